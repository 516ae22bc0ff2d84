"""Signals in shared memory: barriers of the ranks of a node.

    rank 0's row   token, inline | token, inline | description     written by its rank, read by all
    rank 1's row   token, inline | token, inline | description

A rank that enters a barrier writes a token. It is one word, read at once: the digest of the rank's call (61 bits of a
hash of its description), plus its sequence number (of barriers entered), plus the digest of the label. Odd and even
sequence numbers have separate slots.

    sequence   5        6        7        8
    slot 0              d6 + 6            d8 + 8     a rank has entered barrier 8 when its token of 6 was replaced;
    slot 1     d5 + 5            d7 + 7              it is in the same call if its token equals this rank's own

All tokens of a barrier are equal once all ranks have left it, so each rank knows the previous contents of the others'
slots. A token that equals the one of two barriers ago by chance (1 in 2^61) would cause a wait, not a false match.

A few bytes of payload travel beside the token (`inline`), in the cache lines that a waiting rank reads anyway. They are
read before the next barrier is entered, and overwritten for the next but one.

A wait polls the rows of the others. If each rank has its own cores, it polls a thousand times (some 50 us) before it
yields the core between polls. If the threads of a rank share one, it yields after 128; if ranks do, at once. The main
thread of a rank with cores of its own, which has nothing else to do, goes on polling: Linux may give a core that is
yielded to any other program, for some milliseconds, while the late rank needs microseconds. `Win.Sync`
is the memory fence that MPI requires. Barriers leave it out on x86-64, whose processors keep the order of stores and
the order of loads: there it would cost more than the rest of a barrier.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from threading import current_thread, main_thread

import numpy as np

from unisono.binding import oversubscribed
from unisono.call import WORDS_BYTES, Call, call_of, decode_words, differ_in_place, difference, encode_words
from unisono.errors import MismatchError, PlaceMismatchError
from unisono.launch import available_cores
from unisono.mpi import MPI
from unisono.transports.arithmetic import Array
from unisono.transports.compiled import compiled
from unisono.transports.window import Window

VARIABLE = "UNISONO_COMPILED"
"""Environment variable: "off" plays barriers and steps by Python alone."""

BARRIER_ROWS = np.array([(5, 0, 0, 0, 0)], np.int64)
"""Program of a barrier alone (`steps.py`)."""

INLINE_BYTES = 120
"""Largest payload in bytes beside a token: together they fill two cache lines."""

TOKEN_WORDS = 1 + INLINE_BYTES // 8
"""Words of 8 bytes of a token and the payload beside it."""

SIGNALS_BYTES = 2 * 8 * TOKEN_WORDS + WORDS_BYTES
"""Bytes of a rank's signals in shared memory."""

ORDERED_MACHINES = ("x86_64", "AMD64")
"""Processors that make stores visible in program order, and loads likewise."""

STATE = SEQUENCE, LABEL, BEFORE, ENDED = range(4)
"""Numbers that this rank shares with compiled players: barriers entered, the label's digest, the own token of two
barriers ago, and 1 after the end."""

SHARED_SPINS, SINGLE_SPINS = 5, 128
"""Polls before a wait yields the core: to other ranks that share it, or to other threads of a rank of one core. The
latter poll for some 6 us, as long as a short call takes: each yield takes a microsecond.
"""

POLLS_PER_PROGRESS = 1024
"""Polls of memory between two calls for MPI's progress, which a rank that has not arrived yet may need."""

POLLS_WITHOUT_LOCK = 512
"""Polls of compiled code, some 15 us, in which other threads of this rank may run Python."""

COMPILED_SPINS, COMPILED_YIELDS = 1024, 256
"""Polls of compiled code, some 15 to 40 ns each, before it yields the core or returns to Python's own wait; and yields
of ranks that share cores."""

SLEEP_AFTER_SECONDS = 2e-3
"""Seconds after which a wait sleeps between polls: a rank that is so late is computing."""

SLEEP_SECONDS = 5e-5
"""Seconds of such a sleep."""

MAX_BARRIERS = 256
"""Largest number of prepared barriers that are kept."""

SLEEPS_PER_PROGRESS = 64
"""Sleeps between two calls for MPI's progress."""


def is_compiled() -> bool:
    """Return True where compiled code was made at installation, and this process may use it."""
    return compiled is not None and os.environ.get(VARIABLE, "") != "off"


class Signals:
    """Barriers of the ranks of a node, which compiled code plays where there is some."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        ranks: Sequence[int],
        check_interrupt: Callable[[], None],
        window: Window,
        start: int,
    ) -> None:
        """`ranks` are the ranks' numbers in error messages. `check_interrupt` is called regularly in waits; it raises
        to end the wait. The signals lie in SIGNALS_BYTES bytes of a window, from byte `start` of each rank on."""
        self.rank, self.size, self._comm = comm.rank, comm.size, comm
        self.ranks, self._check_interrupt = ranks, check_interrupt
        memories = [memoryview(buffer)[start : start + SIGNALS_BYTES] for buffer in window.buffers]
        self._descriptions = [memory[-WORDS_BYTES:] for memory in memories]
        self.rows = [memory[:-WORDS_BYTES].cast("q") for memory in memories]
        """Tokens of all ranks, each with the words beside it, for barriers of even and then of odd sequence numbers."""
        self._addresses = [buffer.address + start for buffer in window.buffers]
        self._own = self.rows[self.rank]
        self._others = [row for rank, row in enumerate(self.rows) if rank != self.rank]
        self._own[:] = memoryview(bytes(self._own.nbytes)).cast("q")
        self.inline_addresses = [[address + first + 8 for address in self._addresses] for first in (0, 8 * TOKEN_WORDS)]
        """Addresses of what travels beside the tokens of all ranks, for even and for odd sequence numbers."""
        self._state = memoryview(bytearray(8 * len(STATE))).cast("q")
        self._label = ""
        self._barrier_of = lru_cache(MAX_BARRIERS)(self.prepare_barrier)  # refusals have one digest, but other words
        self.waiting: Call | None = None
        """Call in which this rank is waiting, for some milliseconds at least; else None."""
        cores, masks = available_cores(), comm.allgather(available_cores())
        crowds = [oversubscribed([theirs for theirs in masks if theirs & mask] or masks) for mask in masks]
        single = len(cores) == 1  # on which this rank's other threads wait
        shared = crowds[self.rank]
        self.share_cores = any(crowds)
        """True on all ranks where some share a core: each barrier then switches between them."""
        self._spins = SHARED_SPINS if shared else SINGLE_SPINS if single else POLLS_PER_PROGRESS
        self._keeps_core = not (shared or single)
        self._compiled_waits = (SHARED_SPINS, COMPILED_YIELDS) if shared else (COMPILED_SPINS, 0)
        self.compiled = is_compiled()
        """True where barriers and short steps are played by compiled code."""
        self._barrier_fence = None if platform.machine() in ORDERED_MACHINES else window.sync
        window.sync()
        comm.Barrier()

    def label_calls(self, label: str) -> None:
        """Compare `label` too in each later barrier, in addition to the call."""
        self._label, self._state[LABEL] = call_of(label) if label else ("", 0)

    @property
    def sequence(self) -> int:
        """Number of barriers that this rank has entered."""
        return self._state[SEQUENCE]

    def barrier(self, call: Call) -> None:
        """Wait until all ranks have entered this barrier. Raises MismatchError on every rank if their calls differ."""
        self._barrier_of(call)()

    def prepare_barrier(self, call: Call) -> Callable[[], None]:
        """Return the barrier of a call as a function, for calls that are repeated."""
        if self.compiled:
            return self.connect(call, [BARRIER_ROWS])
        digest, fence, complete = call.digest, self._barrier_fence, self._complete
        own_row, others, state = self._own, self._others, self._state

        def barrier() -> None:
            if state[ENDED]:
                self._check_interrupt()
            sequence = state[SEQUENCE] + 1
            index = TOKEN_WORDS if sequence & 1 else 0
            state[BEFORE] = own_row[index]
            state[SEQUENCE] = sequence
            token = digest + sequence + state[LABEL]
            if fence:
                fence()
            own_row[index] = token
            for row in others:
                if row[index] != token:
                    complete(call)
                    break
            if fence:
                fence()

        return barrier

    def connect(self, call: Call, programs: Sequence[Array]) -> Callable[[], None]:
        """Return the compiled player of programs, tables of rows, whose barriers are those of this memory.

        What may take long is done here, in Python: see `_complete`.
        """
        own_address = self._addresses[self.rank]
        other_addresses = tuple(self._addresses[: self.rank] + self._addresses[self.rank + 1 :])
        waits, complete = self._compiled_waits, partial(self._complete, call)
        memory = self._state, own_address, other_addresses, TOKEN_WORDS
        return compiled.make_player(*memory, *waits, call.digest, tuple(programs), complete)  # type: ignore[no-any-return]

    def _complete(self, call: Call) -> None:
        """Wait until all ranks have entered the barrier that this one has. Raises MismatchError as `barrier` does."""
        if self._state[ENDED]:  # perhaps meanwhile, in another thread
            self._check_interrupt()
        index, before = TOKEN_WORDS if self.sequence & 1 else 0, self._state[BEFORE]
        token, agreed = self._own[index], True
        for row in self._others:
            if row[index] != token and self._wait_for_token(row, index, before, call) != token:
                agreed = False  # continue: no rank leaves this barrier before all have entered it: all detect it
        if not agreed:
            self._raise_mismatch(call)

    def _wait_for_token(self, row: memoryview, index: int, before: int, call: Call) -> int:
        """Return the token of a rank once it differs from `before`; the rank cannot be two barriers ahead."""
        for _ in range(self._spins):
            if row[index] != before:
                return int(row[index])
        polls, start = 0, time.monotonic()
        keeps_core = self._keeps_core and self.compiled and current_thread() is main_thread()
        while row[index] == before:
            if time.monotonic() - start > SLEEP_AFTER_SECONDS:
                time.sleep(SLEEP_SECONDS)
                polls += POLLS_PER_PROGRESS // SLEEPS_PER_PROGRESS
            elif keeps_core:
                compiled.poll_word(row, index, before, POLLS_WITHOUT_LOCK)
                polls += POLLS_PER_PROGRESS // SLEEPS_PER_PROGRESS
            else:
                os.sched_yield()
                polls += 1
            if polls >= POLLS_PER_PROGRESS:
                polls = 0
                self.waiting = self._labelled(call)
                self._comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
                self._check_interrupt()
        self.waiting = None
        return int(row[index])

    def _labelled(self, call: Call) -> Call:
        return Call(call.description + self._label, call.digest + self._state[LABEL])

    def _raise_mismatch(self, call: Call) -> None:
        """Exchange descriptions and raise MismatchError; on every rank, as each differs from at least one other."""
        description, digest = self._labelled(call)  # refusals have one digest, and other calls may have equal words
        self._descriptions[self.rank][:] = encode_words(Call(f"{digest:x} {description}", digest))
        # equal on all ranks, as after any barrier; a rank that is still in this one sees that it differs from its own
        self._own[(self.sequence & 1) * TOKEN_WORDS] = -self.sequence
        barrier = self.prepare_barrier(Call(call.description, -self._state[LABEL]))  # equal tokens, whatever the calls
        barrier()
        texts = [decode_words(bytes(encoded)).partition(" ") for encoded in self._descriptions]
        barrier()  # no rank writes another description before all have read these
        digests, calls = [text[0] for text in texts], [text[2] for text in texts]
        others = (rank for rank, theirs in enumerate(digests) if theirs != digests[self.rank])
        other_rank = next(others, (self.rank + 1) % self.size)
        error = PlaceMismatchError if differ_in_place(calls) else MismatchError
        raise error(difference(self.ranks[self.rank], calls[self.rank], self.ranks[other_rank], calls[other_rank]))

    def end(self) -> None:
        """Make all later operations call `check_interrupt`, which raises: the world has ended."""
        self._state[ENDED] = 1

    def free(self) -> None:
        """End the barriers, before their memory is freed."""
        self._state[ENDED] = 1
        for view in (*self.rows, *self._descriptions):
            view.release()
