"""Ranks that wait for each other in different calls: how they find out, across nodes, at no cost while all is well.

    rank 0   call 7: allreduce(5 x float32)   waits ... waits ── "I am in call 7: allreduce(5 x float32)" ──▶ neighbours
    rank 1   call 7: allreduce(7 x float32)   waits ... compares: its own call 7 was another ── verdict ──▶ all ranks

Messages of different calls never match (`transports/messages.py`), so a difference shows as waiting. Each rank counts
its calls and remembers the last ones. A rank that has waited for PATIENCE tells its two neighbours what it waits in;
whoever was in another call of that number tells everyone both. Where ranks differ, some pair of neighbours differs.

A thread does the telling and the listening, so that a rank that has gone on, or is held inside the MPI library, hears
it too. A wait that is ours raises MismatchError; a rank held inside the library cannot: it prints the error and ends
the job. Ranks of one node also leave what they are in where the others see it: those that differ inside the library
may hold each other up for good, and then no message gets through.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from unisono import witness
from unisono.errors import MismatchError
from unisono.mpi import MPI
from unisono.transports.windows import Window

PATIENCE = 2.0
"""Seconds in one call after which a rank tells its neighbours where it is."""

LISTEN = 0.2
"""Seconds between two looks for news."""

GRACE = 1.0
"""Seconds that a rank inside the MPI library leaves the others to raise their errors."""

REMEMBERED = 256
"""Calls that a rank remembers."""

WORDS = 512
"""Bytes of the words that the ranks of a node see of each other."""

REMEDY = "every rank of a group must make the same calls in the same order"


class Note(NamedTuple):
    """What a rank says: that it waits in a call, or, with a verdict, that two ranks differ."""

    rank: int
    number: int
    words: str
    verdict: str = ""


def judge(mine: str, rank: int, note: Note) -> str:
    """What is wrong when this rank was in `mine` and another in what its note says; empty when nothing is."""
    if mine == note.words:
        return ""
    return difference(note.rank, note.words, rank, mine)


def difference(one: int, words: str, other: int, other_words: str) -> str:
    """The error of two ranks that differ."""
    return f"rank {one} called {words}, but rank {other} called {other_words}: {REMEDY}"


class Watch:
    """Watches over the calls of the ranks of `comm`. Made and freed by all of them together.

    `node` has the ranks of this rank's node, by their numbers in `comm`.
    """

    def __init__(self, comm: MPI.Intracomm, node: Sequence[int]) -> None:
        self.rank, self.size = comm.rank, comm.size
        self._comm = comm.Dup()
        self._board = _Board(self._comm, node)
        self._number = 0
        self._calls = [""] * REMEMBERED  # call number n at place n % REMEMBERED
        self._busy = False
        self._notes: list[Note] = []  # what neighbours wait in; some of it this rank may not have come to
        self._in_library = False
        self._told = 0  # the last call that the neighbours were told of
        self._verdict = ""
        self._sending: list[MPI.Request] = []
        self._lock = threading.Lock()  # over what is being sent, which both threads add to
        self._all_told = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unisono watch", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    @contextmanager
    def over(self, words: str, in_library: bool = False) -> Iterator[int]:
        """A call, or a part of one; gives a number that ranks in the same call have in common."""
        outer = self.begin(words, in_library)
        try:
            yield zlib.crc32(words.encode(), self._number)
        finally:
            self.end(outer)

    def begin(self, words: str, in_library: bool) -> tuple[bool, bool]:
        """Begin a call, or a part of one; what `end` wants. The thread takes the time: for short calls that counts."""
        if self._verdict:
            self.check()
        outer = self._busy, self._in_library
        if not self._busy:
            number = self._number + 1
            self._calls[number % REMEMBERED] = words
            self._number, self._busy = number, True
        self._in_library = in_library
        return outer

    def end(self, outer: tuple[bool, bool]) -> None:
        """End what `begin` began."""
        self._busy, self._in_library = outer

    def _words(self, number: int) -> str:
        """What this rank was in as its call of that number; empty when that was long ago, or is to come."""
        return self._calls[number % REMEMBERED] if self._number - REMEMBERED < number <= self._number else ""

    def check(self) -> None:
        """Raise MismatchError when ranks were found to differ: now or before."""
        if self._verdict:
            raise MismatchError(self._verdict)

    def tell_all(self, verdict: str) -> None:
        """Tell every rank that two of them differ."""
        self._verdict = self._verdict or verdict
        with self._lock:
            if not self._all_told:
                self._all_told = True
                self._send(Note(self.rank, self._number, "", verdict), set(range(self.size)) - {self.rank})

    def stop(self) -> None:
        """End the thread: no word comes from here any more."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        atexit.unregister(self.stop)

    def free(self) -> None:
        """Give the communicator and the board back, all ranks together; unless ranks differed: then all is kept."""
        if self._verdict:
            return
        self.stop()
        everyone = self._comm.Ibarrier()
        while not everyone.Test():  # notes that were sent before all had come are of no use any more
            self._listen()
        self._listen()
        MPI.Request.Waitall(self._sending)
        self._board.free()
        self._comm.Free()

    def _run(self) -> None:
        seen, since = 0, 0.0
        while not self._stop.wait(LISTEN):
            busy, number = self._busy, self._number
            if number != seen or not busy:
                seen, since = number, time.monotonic()
            stuck = busy and time.monotonic() - since > PATIENCE
            if stuck and not self._verdict:
                self._look_around(number)
            if busy and self._in_library and not stuck:
                continue  # the library may let nobody else send while it waits
            if stuck and self._told < number and not self._verdict:
                self._told = number
                self._tell_neighbours(number)
            self._listen()
            with self._lock:
                self._sending = [request for request in self._sending if not request.Test()]
            if self._verdict and self._busy and self._in_library:
                self._end_all()

    def _look_around(self, number: int) -> None:
        """Compare with the ranks of this node, without a message."""
        self._board.write(number, self._words(number))
        time.sleep(LISTEN)  # they may be about to write
        for rank, (theirs, words) in self._board.read().items():
            verdict = judge(self._words(number), self.rank, Note(rank, theirs, words)) if theirs == number else ""
            if verdict and self._number == number and self._busy:
                self._verdict = self._verdict or verdict
                if self._in_library:
                    self._end_all()

    def _tell_neighbours(self, number: int) -> None:
        note = Note(self.rank, number, self._words(number))
        with self._lock:
            self._send(note, {(self.rank + 1) % self.size, (self.rank - 1) % self.size} - {self.rank})

    def _send(self, note: Note, ranks: Iterable[int]) -> None:
        self._sending += [self._comm.isend(note, rank) for rank in ranks]

    def _listen(self) -> None:
        """Take all notes that have come."""
        while self._comm.Iprobe():
            note: Note = self._comm.recv()
            if note.verdict:
                self._verdict, self._all_told = self._verdict or note.verdict, True
            else:
                self._notes.append(note)
        for note in self._notes:
            mine = self._words(note.number)
            if mine and not self._verdict and (verdict := judge(mine, self.rank, note)):
                self.tell_all(verdict)
        self._notes = [note for note in self._notes if note.number > self._number]

    def _end_all(self) -> None:
        """Say what is wrong and end: the launcher ends the others. No call into the library, which holds this rank."""
        number = self._number
        time.sleep(GRACE)
        if not (self._busy and self._in_library and self._number == number):
            return  # the wait was ours after all, and has raised the error
        witness.last_words(f"rank {self.rank} of {self.size}: unisono.errors.MismatchError: {self._verdict}\n")
        time.sleep(GRACE)  # for the other ranks' last words
        os._exit(1)


class _Board:
    """Where the ranks of a node see in what call each waits. Written by the watch's thread alone."""

    def __init__(self, comm: MPI.Intracomm, node: Sequence[int]) -> None:
        self._comm: MPI.Intracomm = comm.Split(min(node), comm.rank)  # type: ignore[assignment]
        self._ranks = sorted(node)
        self._window = Window(self._comm, 8 + WORDS)
        memoryview(self._window.own)[:8] = bytes(8)
        self._comm.Barrier()

    def write(self, number: int, words: str) -> None:
        """Say in what call this rank waits."""
        own = memoryview(self._window.own)
        own[:8] = bytes(8)
        own[8 : 8 + WORDS] = words.encode()[:WORDS].ljust(WORDS)
        own[:8] = number.to_bytes(8, "little")

    def read(self) -> dict[int, tuple[int, str]]:
        """For each rank the number of the last call in which it waited for long, and its words."""
        seen = {}
        for rank, buffer in zip(self._ranks, self._window.buffers, strict=True):
            line = bytes(memoryview(buffer)[: 8 + WORDS])
            seen[rank] = int.from_bytes(line[:8], "little"), line[8:].decode(errors="replace").strip()
        return seen

    def free(self) -> None:
        """Give the memory back, all ranks together."""
        self._window.free()
        self._comm.Free()
