"""Signals in shared memory: barriers of the ranks of a node, and notices that memory is ready or was read.

    rank 0's row   token | token | posted[lane][peer] | taken[lane][peer] | words        a row is written by its rank
    rank 1's row   token | token | posted[lane][peer] | taken[lane][peer] | words        alone and read by all

A rank that enters a barrier writes a token. It is one word, read at once: the number of the rank's call (61 bits of a
hash of its words), plus its sequence number (of barriers entered), plus the number of the label. Odd and even sequence
numbers have separate slots.

    sequence   5        6        7        8
    slot 0              n6 + 6            n8 + 8     a rank has entered barrier 8 when its token of 6 was replaced;
    slot 1     n5 + 5            n7 + 7              it is in the same call if its token equals this rank's own

All tokens of a barrier are equal once all ranks have left it, so each rank knows the previous contents of the others'
slots. A token that equals the one of two barriers ago by chance (1 in 2^61) would cause a wait, not a false match.

A wait polls the rows of the others. If each rank has its own cores, it polls a thousand times (some 50 us) before it
yields the core between polls. If ranks share cores, or the threads of a rank share one, it yields at once. `Win.Sync`
is the memory fence that MPI requires.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from unisono.binding import oversubscribed
from unisono.call import WORDS_BYTES, Call, call_of, decode_words, encode_words
from unisono.errors import MismatchError
from unisono.launch import available_cores
from unisono.mpi import MPI
from unisono.transports.window import Window

Result = TypeVar("Result")

MAX_LANES = 16
"""Largest number of lanes of a schedule on a window."""

POLLS_PER_PROGRESS = 1024
"""Polls of memory between two calls for MPI's progress, which a rank that has not arrived yet may need."""

SLEEP_AFTER_SECONDS = 2e-3
"""Seconds after which a wait sleeps between polls: a rank that is so late is computing."""

SLEEP_SECONDS = 5e-5
"""Seconds of such a sleep."""

SLEEPS_PER_PROGRESS = 64
"""Sleeps between two calls for MPI's progress."""


class Signals:
    """Barriers and notices about memory among the ranks of a node."""

    def __init__(self, comm: MPI.Intracomm, ranks: Sequence[int], check_interrupt: Callable[[], None]) -> None:
        """`ranks` are the ranks' numbers in error messages.

        `check_interrupt` is called regularly in waits; it raises to end the wait.
        """
        self.rank, self.size, self._comm = comm.rank, comm.size, comm
        self.ranks, self._check_interrupt = ranks, check_interrupt
        counters = 2 + 2 * MAX_LANES * self.size
        self._window = Window(comm, 8 * counters + WORDS_BYTES)
        rows = [memoryview(buffer)[: 8 * counters].cast("q") for buffer in self._window.buffers]
        self._words = [memoryview(buffer)[8 * counters : 8 * counters + WORDS_BYTES] for buffer in self._window.buffers]
        self._rows: list[memoryview] = rows
        self._own: Any = rows[self.rank]
        self._others = [row for rank, row in enumerate(rows) if rank != self.rank]
        self._own[:] = memoryview(bytes(8 * counters)).cast("q")
        self.sequence = 0
        self._label, self._label_number = "", 0
        self.waiting: Call | None = None
        """Call in which this rank is waiting, for some milliseconds at least; else None."""
        own, masks = available_cores(), comm.allgather(available_cores())
        sharing = [mask for mask in masks if mask & own] or masks
        single = len(own) == 1  # on which this rank's other threads wait
        self._spins = 5 if single or oversubscribed(sharing) else POLLS_PER_PROGRESS
        self.fence = self._window.sync
        self.fence()
        comm.Barrier()

    def label_calls(self, words: str) -> None:
        """Compare `words` too in each later barrier, in addition to the call."""
        self._label, self._label_number = call_of(words) if words else ("", 0)

    def barrier(self, call: Call) -> None:
        """Wait until all ranks have entered this barrier. Raises MismatchError on every rank if their calls differ."""
        sequence = self.sequence = self.sequence + 1
        index, own, fence = sequence & 1, self._own, self.fence
        before = own[index]
        token = call.number + sequence + self._label_number
        fence()
        own[index] = token
        agreed = True
        for row in self._others:
            if row[index] != token and self._wait_for_token(row, index, before, call) != token:
                agreed = False  # continue: no rank leaves this barrier before all have entered it, so all detect it
        if not agreed:
            self._raise_mismatch(call)
        fence()

    def _wait_for_token(self, row: memoryview, index: int, before: int, call: Call) -> int:
        """Return the token of a rank once it differs from `before`; the rank cannot be two barriers ahead."""
        for _ in range(self._spins):
            if row[index] != before:
                return int(row[index])
        self.wait_until(lambda: row[index] != before, call)
        return int(row[index])

    def wait_until(self, poll: Callable[[], Result], call: Call) -> Result:
        """Call `poll` until its result is true; return the result. This rank waits in `call` meanwhile."""
        polls, start = 0, time.monotonic()
        while not (result := poll()):
            if time.monotonic() - start > SLEEP_AFTER_SECONDS:
                time.sleep(SLEEP_SECONDS)
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
        return result

    def _labelled(self, call: Call) -> Call:
        return Call(call.words + self._label, call.number + self._label_number)

    def _raise_mismatch(self, call: Call) -> None:
        """Exchange words and raise MismatchError; on every rank, because each differs from at least one other."""
        index = self.sequence & 1
        tokens = [int(row[index]) for row in self._rows]  # which the next barrier but one must find replaced
        self._words[self.rank][:] = encode_words(self._labelled(call))
        self._barrier_unchecked([self._own[index ^ 1]] * self.size, call)
        calls = [decode_words(bytes(words)) for words in self._words]
        self._barrier_unchecked(tokens, call)  # no rank writes other words before all have read these
        other = next(rank for rank, token in enumerate(tokens) if token != tokens[self.rank])
        raise MismatchError(
            f"rank {self.ranks[self.rank]} called {calls[self.rank]}, "
            f"but rank {self.ranks[other]} called {calls[other]}: "
            "every rank of a group must make the same calls in the same order"
        )

    def _barrier_unchecked(self, before: Sequence[int], call: Call) -> None:
        """Wait in a barrier without a comparison of calls; `before` are the tokens of two barriers ago."""
        self.sequence += 1
        index = self.sequence & 1
        self.fence()
        self._own[index] = -self.sequence
        for rank, row in enumerate(self._rows):
            if rank != self.rank:
                self._wait_for_token(row, index, before[rank], call)
        self.fence()

    def end(self) -> None:
        """Make all later operations call `check_interrupt`, which raises: the world has ended."""
        self._own = _Ended(self._check_interrupt)

    def post(self, lane: int, peer: int) -> int:
        """Signal that this rank's memory is ready for `peer`; return the number of such signals so far."""
        index = 2 + lane * self.size + peer
        self.fence()
        self._own[index] += 1
        return int(self._own[index])

    def take(self, lane: int, peer: int) -> None:
        """Signal that this rank has read the memory that `peer` posted."""
        self.fence()
        self._own[2 + (MAX_LANES + lane) * self.size + peer] += 1

    def posted(self, lane: int, peer: int) -> int:
        """Return the number of times that `peer` signalled memory ready for this rank."""
        return int(self._rows[peer][2 + lane * self.size + self.rank])

    def taken(self, lane: int, peer: int) -> int:
        """Return the number of times that `peer` signalled to have read this rank's memory."""
        return int(self._rows[peer][2 + (MAX_LANES + lane) * self.size + self.rank])

    def took(self, lane: int, peer: int) -> int:
        """Return the number of times that this rank has read memory that `peer` posted."""
        return int(self._own[2 + (MAX_LANES + lane) * self.size + peer])

    def free(self) -> None:
        """Free the memory; called by all ranks together."""
        for view in (*self._rows, *self._words):
            view.release()
        self._window.free()


class _Ended:
    """Stand-in for a rank's own row after the end; each access calls `check_interrupt`."""

    def __init__(self, check_interrupt: Callable[[], None]) -> None:
        self._check_interrupt = check_interrupt

    def __getitem__(self, index: int) -> int:
        self._check_interrupt()
        return 0

    def __setitem__(self, index: int, token: int) -> None:
        self._check_interrupt()
