"""Watch over all calls of a process: reports the ranks missing from a call and their positions, and ends long waits.

    after 2 s    across nodes: neighbours in the world compare their calls; those that differ raise MismatchError
                 within one, a wait for a rank that has found that two differ is ended by the same error
                 a wait for a rank that is known to have ended its program, as all of this node are, is ended
    after 10 s   all ranks are queried for their call sites; one of those that wait reports the missing ranks, once
                 a wait for a rank that has ended its program, or is dead, is ended
    time-out     every wait is ended: StallError
    at once      every wait is ended, where others go on after the death of a rank, and the library tells of one

A thread checks the current calls of this rank five times a second. While no rank waits for long, it sends and
writes nothing. The ranks of a node answer in shared memory, those of other nodes by messages (`state_queries.py`). A
report is a pure function of the answers (`states.py`).

Messages of different calls never match (`transports/messages.py`), so across nodes ranks in different calls wait for
each other. Each rank keeps its last calls (`Calls`); if ranks differ, some pair of neighbours differs. The
descriptions of calls are compared. A wait in unisono raises. A rank blocked inside the MPI library cannot raise: it
prints the error and ends all ranks. The time-out is the job's; a process group has its own.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress

from unisono import witness
from unisono.call import difference
from unisono.collectives.state_queries import POLL_SECONDS, REPLY_TIMEOUT_SECONDS, CallNotice, StateQueries
from unisono.collectives.states import (
    SILENT,
    Calls,
    State,
    Wait,
    call_site,
    failure,
    is_hopeless,
    is_reporter,
    missing_ranks,
    report,
)
from unisono.errors import MismatchError, StallError
from unisono.launch import SURVIVORS_VARIABLE, TIMEOUT
from unisono.mpi import MPI

COMPARE_AFTER_SECONDS = 2.0
"""Seconds in one call after which a rank sends its call to its neighbours in the world."""

REPORT_AFTER_SECONDS = 10.0
"""Seconds in one call after which the missing ranks are reported; half the time-out if that is less."""

ERROR_GRACE_SECONDS = 1.0
"""Seconds that a rank blocked in the MPI library gives the others to raise their errors."""

SURVIVING: weakref.WeakSet[Watch] = weakref.WeakSet()
"""Watches of this process, where ranks go on in their processes after a death."""


class Watch:
    """Watch over the calls of a process, in all worlds that are made of the ranks of `comm`, which make and free it
    together. `node` lists the ranks of this rank's node."""

    def __init__(self, comm: MPI.Intracomm, node: Sequence[int], timeout: float = TIMEOUT) -> None:
        self.rank, self.size, self.timeout = comm.rank, comm.size, timeout
        self._comm = comm.Dup()
        self._lost = False  # True once a rank is known to have died, where the library goes on after that
        self._worlds: dict[str, Calls] = {}
        self._lock = threading.RLock()  # over the worlds that are watched, and what is seen of them
        self._pending: list[CallNotice] = []  # of calls that this rank may not have entered
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unisono watch", daemon=True)
        self._queries = StateQueries(self._comm, node, self._state, self._on_notice, self._is_blocked)
        self._thread.start()
        atexit.register(self._leave)
        if SURVIVORS_VARIABLE in os.environ:
            SURVIVING.add(self)

    # What the worlds of this process call

    def ranks_of(self, comm: MPI.Intracomm) -> list[int]:
        """Return the ranks of `comm`, a part of the job, as ranks of the job."""
        part, job = comm.Get_group(), self._comm.Get_group()
        ranks = MPI.Group.Translate_ranks(part, list(range(comm.size)), job)
        part.Free()
        job.Free()
        return list(ranks)

    def add(self, calls: Calls) -> None:
        """Begin to watch the calls of a world."""
        with self._lock:
            before = self._worlds.get(calls.name)
            self._worlds[calls.name] = calls
            if before is not None:  # of the same name: nobody is to read how it ended
                self._queries.node.write(self._state())

    def remove(self, calls: Calls) -> None:
        """Stop watching the calls of a world, whose memory is about to be freed."""
        with self._lock:
            if self._worlds.get(calls.name) is calls:
                del self._worlds[calls.name]

    def has_ended(self, calls: Calls, member: int) -> bool:
        """Return True if a rank is known to have ended its program; one of another node is asked, for a later call."""
        rank = calls.ranks[member]
        self._queries.send(None, {rank} - set(self._queries.node.ranks))
        state = self._queries.last_state(rank)
        return state is not None and state.ended

    def report_mismatch(self, calls: Calls, verdict: str) -> None:
        """Report to every rank of a world that two of them differ. A rank of this node reads it once it has waited."""
        notified = calls.failure is not None
        calls.fail(MismatchError, verdict)
        if not notified:
            with self._lock:
                self._queries.node.write(self._state())
            self._queries.send(CallNotice(calls.name, self._rank_in(calls), calls.number, "", verdict), calls.ranks)

    def compare_calls(self, calls: Calls, member: int, count: int) -> None:
        """Send a rank of a world the last `count` calls of this one: the first that differs is reported to all."""
        for call_number in range(max(1, calls.number - count + 1), calls.number + 1):
            notice = CallNotice(calls.name, self._rank_in(calls), call_number, calls.description(call_number))
            self._queries.send(notice, {calls.ranks[member]})

    def look_for_dead(self) -> bool:
        """Return True if the library knows that a rank has died; all waits are ended then."""
        if not self._lost:
            failed = self._comm.Get_failed()
            if failed.size:
                self.end_worlds()
            failed.Free()
        return self._lost

    def end_worlds(self) -> None:
        """End all waits of this rank, and those of others for it: a rank has died."""
        with self._lock:
            for calls in () if self._lost else self._worlds.values():
                calls.fail(StallError, "another rank has died")
                for channel in calls.channels:  # others may wait for this rank in the library
                    channel.Revoke()
            self._lost = True

    def stop(self) -> None:
        """Leave without the other ranks. Nothing is sent afterwards."""
        self._end_thread()
        with suppress(MPI.Exception):  # of ranks that have died
            self._queries.stop()

    def free(self) -> None:
        """Free the communicator and the memory; called by all ranks together."""
        self._end_thread()
        self._queries.free()
        self._comm.Free()

    def _end_thread(self) -> None:
        SURVIVING.discard(self)
        atexit.unregister(self._leave)
        self._stop.set()
        self._thread.join()

    def _leave(self) -> None:
        """Report the end of the program to ranks that wait for this one."""
        self._stop.set()
        self._thread.join()
        self._queries.node.write(self._state())
        self._queries.leave()

    # What its threads do

    def _run(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            if self in SURVIVING:
                self.look_for_dead()
            with self._lock:
                if self._queries.node.queried:
                    self._queries.node.write(self._state())
                for calls in self._worlds.values():
                    self._check(calls)

    def _check(self, calls: Calls) -> None:
        current, progress = calls.current, calls.progress
        if current is None or current.number != progress.number:
            progress.begin(0 if current is None else current.number)
            return
        if calls.failure is not None:
            if calls.in_library:
                self._end_all(calls, current)
            return
        seconds = progress.seconds
        if calls.signals is None and seconds > COMPARE_AFTER_SECONDS:
            self._compare(calls, current)
        if progress.queried is not None:
            self._report(calls, current, progress.queried)
            return
        timeout = calls.timeout or self.timeout
        due = seconds > (timeout if progress.reported else min(REPORT_AFTER_SECONDS, timeout / 2))
        if due or (seconds > COMPARE_AFTER_SECONDS and self._has_left(calls, current.number)):
            progress.queried = self._queries.query(calls.ranks)

    def _has_left(self, calls: Calls, call_number: int) -> bool:
        """Return True if a rank of a world is known to have ended its program before the call of a number. If one is
        known to have found that two ranks differ, the world ends here, too: that one may never answer again."""
        states = [state for rank in calls.ranks if (state := self._queries.last_state(rank)) is not None]
        for verdict in filter(None, (state.broken.get(calls.name) for state in states)):
            calls.fail(MismatchError, verdict)
        return any(state.ended and state.numbers.get(calls.name, call_number) < call_number for state in states)

    def _compare(self, calls: Calls, current: Wait) -> None:
        """Compare calls with the ranks of this node, without messages; then with the neighbours in the world."""
        progress = calls.progress
        if not progress.compared:
            progress.compared = True
            self._queries.query(self._queries.node.ranks)
        elif not progress.notified:
            progress.notified = True
            for rank, answer in self._queries.node.read().items():
                waits = answer.waits if isinstance(answer, State) and rank in calls.ranks else ()
                for theirs in waits:
                    if theirs[:2] == current[:2]:
                        self._check_notice(
                            calls, CallNotice(calls.name, calls.ranks.index(rank), current.number, theirs.description)
                        )
            member, size = self._rank_in(calls), len(calls.ranks)
            notice = CallNotice(calls.name, member, calls.number, calls.description(calls.number))
            self._queries.send(notice, {calls.ranks[(member + 1) % size], calls.ranks[(member - 1) % size]})

    def _check_notice(self, calls: Calls, notice: CallNotice) -> None:
        """End a world if this rank was in another call than the notice says."""
        description = calls.description(notice.number)
        if description and description != notice.description and calls.failure is None:
            self.report_mismatch(calls, difference(notice.rank, notice.description, self._rank_in(calls), description))

    def _report(self, calls: Calls, wait: Wait, queried: float) -> None:
        """Report the missing ranks once all have answered; end a wait that is hopeless or has lasted too long."""
        progress, other_ranks = calls.progress, [rank for rank in calls.ranks if rank != self.rank]
        answers = self._queries.read(other_ranks, queried)
        if time.monotonic() - queried < REPLY_TIMEOUT_SECONDS and SILENT in answers.values():
            return
        missing = missing_ranks(wait, other_ranks, answers)
        message = report(self.rank, self.size, wait, call_site(), missing, answers)
        if not progress.reported and is_reporter(self.rank, wait, answers):
            witness.print_error(f"unisono: {message}\n")
        hopeless = any(is_hopeless(wait, answers.get(rank, SILENT)) for rank in missing)
        if hopeless or progress.reported:
            calls.fail(StallError, failure(message, hopeless, calls.timeout))
        progress.reported, progress.queried = True, None

    def _state(self) -> State:
        with self._lock:
            worlds = list(self._worlds.values())
            waits = tuple(
                current
                for calls in worlds
                if (current := calls.current) and current.number == calls.progress.number and not calls.failure
            )
            numbers = {calls.name: calls.position for calls in worlds}
            failures = {calls.name: calls.failure for calls in worlds if calls.failure is not None}
            broken = {name: message if kind is MismatchError else "" for name, (kind, message) in failures.items()}
            # the program has ended, but not what `atexit` calls: another watch may have left, and wait for other ranks
            ended = not threading.main_thread().is_alive()
            return State("" if ended else call_site(), () if ended else waits, numbers, broken, ended)

    def _on_notice(self, notice: CallNotice) -> None:
        with self._lock:
            calls = self._worlds.get(notice.world)
            if notice.verdict and calls is not None:
                calls.fail(MismatchError, notice.verdict)
            elif not notice.verdict:
                self._pending.append(notice)

    def _is_blocked(self) -> bool:
        """Check the notices on calls that this rank has entered; return True if the library may block a thread."""
        with self._lock:
            notices, self._pending = self._pending, []
            for notice in notices:
                calls = self._worlds.get(notice.world)
                if calls is None or notice.number > calls.number:
                    self._pending.append(notice)
                else:
                    self._check_notice(calls, notice)
            return any(
                calls.busy and calls.in_library and calls.progress.seconds < COMPARE_AFTER_SECONDS
                for calls in self._worlds.values()
            )

    def _rank_in(self, calls: Calls) -> int:
        return calls.ranks.index(self.rank)

    def _end_all(self, calls: Calls, current: Wait) -> None:
        """Print the error and exit; the launcher ends the others. Avoids the library, which blocks this rank."""
        time.sleep(ERROR_GRACE_SECONDS)
        if not calls.in_library or calls.position != current.number:
            return  # the wait was ours after all, and has raised the error
        assert calls.failure is not None
        kind, message = calls.failure
        witness.report_abort(f"rank {self.rank} of {self.size}: {kind.__module__}.{kind.__qualname__}: {message}\n")
        time.sleep(ERROR_GRACE_SECONDS)  # for the other ranks' last words
        os._exit(1)
