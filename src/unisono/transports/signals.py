"""Signals in shared memory: barriers of the ranks of a node, and notices that memory is ready or was read.

    rank 0's line   card | card | posted[lane][peer] | taken[lane][peer] | words         a line is written by its rank
    rank 1's line   card | card | posted[lane][peer] | taken[lane][peer] | words         alone and read by all

A rank that enters a barrier writes a card. It is one word, read at once: the number of the rank's call (61 bits of a
hash of its words), plus its turn (the number of barriers entered), plus the number of the label. Odd and even turns
have separate places.

    turn      5        6        7        8
    place 0            n6 + 6            n8 + 8     a rank has come to turn 8 when its card of turn 6 has gone;
    place 1   n5 + 5            n7 + 7              it is in the same call when its card is this rank's own

All cards of a turn are equal once all ranks have left it, so each rank knows the previous contents of the others'
places. A card that equals the one of two turns ago by chance (1 in 2^61) would cause a wait, not a false match.

A wait polls the lines of the others. If each rank has its own cores, it polls a thousand times (some 50 us) before it
yields the core between polls. If ranks share cores, or the threads of a rank share one, it yields at once. `Win.Sync`
is the memory fence that MPI requires.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from unisono.binding import crowded
from unisono.call import WORDS_BYTES, Call, call, decode_words, encode_words
from unisono.errors import MismatchError
from unisono.launch import own_cores
from unisono.mpi import MPI
from unisono.transports.window import Window

Seen = TypeVar("Seen")

MAX_LANES = 16
"""Largest number of lanes of a schedule on a window."""

LOOKS = 1024
"""Polls of memory between two calls for MPI's progress, which a rank that has not arrived yet may need."""

AWAKE = 2e-3
"""Seconds after which a wait sleeps between polls: a rank that is so late is computing."""

NAP = 5e-5
"""Seconds of such a sleep."""

NAPS = 64
"""Sleeps between two calls for MPI's progress."""


class Signals:
    """Barriers and notices about memory among the ranks of a node."""

    def __init__(self, comm: MPI.Intracomm, ranks: Sequence[int], interrupted: Callable[[], None]) -> None:
        """`ranks` are the ranks' numbers in error messages.

        `interrupted` is called regularly in waits; it raises to end the wait.
        """
        self.rank, self.size, self._comm = comm.rank, comm.size, comm
        self.ranks, self._interrupted = ranks, interrupted
        counters = 2 + 2 * MAX_LANES * self.size
        self._window = Window(comm, 8 * counters + WORDS_BYTES)
        lines = [memoryview(buffer)[: 8 * counters].cast("q") for buffer in self._window.buffers]
        self._words = [memoryview(buffer)[8 * counters : 8 * counters + WORDS_BYTES] for buffer in self._window.buffers]
        self._lines: list[memoryview] = lines
        self._own: Any = lines[self.rank]
        self._others = [line for rank, line in enumerate(lines) if rank != self.rank]
        self._own[:] = memoryview(bytes(8 * counters)).cast("q")
        self.turn = 0
        self._label, self._label_number = "", 0
        self.waiting: Call | None = None
        """Call in which this rank is waiting, for some milliseconds at least; else None."""
        own, masks = own_cores(), comm.allgather(own_cores())
        beside = [mask for mask in masks if mask & own] or masks
        single = len(own) == 1  # on which this rank's other threads wait
        self._patience = 5 if single or crowded(beside) else LOOKS
        self.fence = self._window.sync
        self.fence()
        comm.Barrier()

    def label_calls(self, words: str) -> None:
        """Compare `words` too in each later barrier, in addition to the call."""
        self._label, self._label_number = call(words) if words else ("", 0)

    def meet(self, what: Call) -> None:
        """Wait until all ranks have entered this barrier. Raises MismatchError on every rank if their calls differ."""
        turn = self.turn = self.turn + 1
        place, own, fence = turn & 1, self._own, self.fence
        before = own[place]
        card = what.number + turn + self._label_number
        fence()
        own[place] = card
        agreed = True
        for line in self._others:
            if line[place] != card and self._await(line, place, before, what) != card:
                agreed = False  # go on: nobody leaves this turn before all have come, so that all find out
        if not agreed:
            self._disagree(what)
        fence()

    def _await(self, line: memoryview, place: int, before: int, what: Call) -> int:
        """Return the card of a rank once it differs from `before`; the rank cannot be two turns ahead."""
        for _ in range(self._patience):
            if line[place] != before:
                return int(line[place])
        self.until(lambda: line[place] != before, what)
        return int(line[place])

    def until(self, look: Callable[[], Seen], what: Call) -> Seen:
        """Call `look` until its result is true, in the call `what`; return the result."""
        looks, start = 0, time.monotonic()
        while not (seen := look()):
            if time.monotonic() - start > AWAKE:
                time.sleep(NAP)
                looks += LOOKS // NAPS
            else:
                os.sched_yield()
                looks += 1
            if looks >= LOOKS:
                looks = 0
                self.waiting = self._labelled(what)
                self._comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
                self._interrupted()
        self.waiting = None
        return seen

    def _labelled(self, what: Call) -> Call:
        return Call(what.words + self._label, what.number + self._label_number)

    def _disagree(self, what: Call) -> None:
        """Exchange words and raise MismatchError; on every rank, because each differs from at least one other."""
        place = self.turn & 1
        cards = [int(line[place]) for line in self._lines]  # which the next meeting but one must find gone
        self._words[self.rank][:] = encode_words(self._labelled(what))
        self._meet_anyhow([self._own[place ^ 1]] * self.size, what)
        calls = [decode_words(bytes(words)) for words in self._words]
        self._meet_anyhow(cards, what)  # nobody writes other words before all have read these
        other = next(rank for rank, card in enumerate(cards) if card != cards[self.rank])
        raise MismatchError(
            f"rank {self.ranks[self.rank]} called {calls[self.rank]}, "
            f"but rank {self.ranks[other]} called {calls[other]}: "
            "every rank of a group must make the same calls in the same order"
        )

    def _meet_anyhow(self, before: Sequence[int], what: Call) -> None:
        """Wait in a barrier without a comparison of calls; `before` are the cards of two turns ago."""
        self.turn += 1
        place = self.turn & 1
        self.fence()
        self._own[place] = -self.turn
        for rank, line in enumerate(self._lines):
            if rank != self.rank:
                self._await(line, place, before[rank], what)
        self.fence()

    def end(self) -> None:
        """Make all later operations call `interrupted`, which raises: the world has ended."""
        self._own = _Ended(self._interrupted)

    def post(self, lane: int, peer: int) -> int:
        """Signal that this rank's memory is ready for `peer`; return the number of such signals so far."""
        place = 2 + lane * self.size + peer
        self.fence()
        self._own[place] += 1
        return int(self._own[place])

    def take(self, lane: int, peer: int) -> None:
        """Signal that this rank has read the memory that `peer` posted."""
        self.fence()
        self._own[2 + (MAX_LANES + lane) * self.size + peer] += 1

    def posted(self, lane: int, peer: int) -> int:
        """Return the number of times that `peer` signalled memory ready for this rank."""
        return int(self._lines[peer][2 + lane * self.size + self.rank])

    def taken(self, lane: int, peer: int) -> int:
        """Return the number of times that `peer` signalled to have read this rank's memory."""
        return int(self._lines[peer][2 + (MAX_LANES + lane) * self.size + self.rank])

    def took(self, lane: int, peer: int) -> int:
        """Return the number of times that this rank has read memory that `peer` posted."""
        return int(self._own[2 + (MAX_LANES + lane) * self.size + peer])

    def free(self) -> None:
        """Free the memory; called by all ranks together."""
        for view in (*self._lines, *self._words):
            view.release()
        self._window.free()


class _Ended:
    """Stand-in for a rank's own line after the end; each access calls `interrupted`."""

    def __init__(self, interrupted: Callable[[], None]) -> None:
        self._interrupted = interrupted

    def __getitem__(self, place: int) -> int:
        self._interrupted()
        return 0

    def __setitem__(self, place: int, card: int) -> None:
        self._interrupted()
