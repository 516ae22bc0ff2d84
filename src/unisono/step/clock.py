"""Clock on which step programs are played with costs in place of work: it gives the begin and end of each task.

    lanes       a task waits for what it touches, then for a thread of its lane
    groups      a collective begins when all its members have arrived; each keeps its thread meanwhile
    the link    concurrent collectives share it: together they are no faster than one after another, but for
                their latency

Ranks that are not played are assumed to do the same as the first one that is played, at the same time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple, Protocol, TypeVar

from unisono.errors import StepError
from unisono.step.costs import Costs, Duration
from unisono.step.matching import Carry, Matching, Member
from unisono.step.program import Role, StepProgram, Task, graph_of


class TaskSpan(NamedTuple):
    """Begin and end of a task; `number` is its place in its rank's program."""

    rank: int
    number: int
    task: Task
    begin: float
    end: float


class Clock:
    """Player of one program per rank. `run` returns the spans, in the order in which they end."""

    def __init__(
        self,
        programs: Mapping[int, StepProgram],
        threads: Mapping[str, int],
        price: Callable[[int, Task], Duration],
        carry: Carry | None = None,
    ) -> None:
        """Prepare a run. `price` returns the duration of a rank's task; `carry` is called with the tasks that begin
        together, in order of time."""
        self._programs, self._price, self._carry = programs, price, carry
        graphs = {rank: graph_of(program) for rank, program in programs.items()}
        self._open = {rank: list(graph.before) for rank, graph in graphs.items()}
        self._after = {rank: graph.after for rank, graph in graphs.items()}
        self._free = {(rank, lane): count for rank in programs for lane, count in threads.items()}
        self._queues: defaultdict[tuple[int, str], list[tuple[float, int]]] = defaultdict(list)
        self._matching = Matching(programs)
        self._link = 0.0  # when it is free
        self._events: list[
            tuple[float, int, int, int]
        ] = []  # time, number, rank, and the order in which they were added
        self._begun: dict[tuple[int, int], float] = {}
        self._count = 0

    def run(self) -> list[TaskSpan]:
        """Play all tasks, and return their spans. Raises StepError for a deadlock of ranks."""
        spans: list[TaskSpan] = []
        for rank, waits in self._open.items():
            for number, count in enumerate(waits):
                if not count:
                    self._enter(rank, number, 0.0)
        for rank in self._programs:
            self._dispatch(rank, 0.0, [lane for one, lane in self._free if one == rank])
        while self._events:
            now, number, rank, _ = heappop(self._events)
            task = self._programs[rank][number]
            spans.append(TaskSpan(rank, number, task, self._begun.pop((rank, number)), now))
            self._free[rank, task.lane] += 1
            lanes = {task.lane: None}  # in the order of the program: the same on every run
            for follower in self._after[rank][number]:
                self._open[rank][follower] -= 1
                if not self._open[rank][follower]:
                    self._enter(rank, follower, now)
                    lanes[self._programs[rank][follower].lane] = None
            self._dispatch(rank, now, lanes)
        if len(spans) < sum(map(len, self._programs.values())):
            waiting = ", ".join(self._matching.waiting()) or "tasks of one rank"
            raise StepError(f"deadlock: {waiting}")
        return spans

    def _enter(self, rank: int, number: int, now: float) -> None:
        heappush(self._queues[rank, self._programs[rank][number].lane], (now, number))

    def _dispatch(self, rank: int, now: float, lanes: Iterable[str]) -> None:
        """Assign ready tasks to the free threads of some lanes."""
        for lane in lanes:
            queue = self._queues[rank, lane]
            while queue and self._free[rank, lane]:
                _, number = heappop(queue)
                self._free[rank, lane] -= 1
                together = self._matching.arrive(Member(rank, self._programs[rank][number], number))
                if together:
                    self._begin(together, now)

    def _begin(self, together: Sequence[Member], now: float) -> None:
        if self._carry is not None:
            self._carry(together)
        first = together[0]
        end = self._end(first.rank, first.task, now)
        for one in together:
            self._begun[one.rank, one.token] = now
            self._count += 1
            heappush(self._events, (end, one.token, one.rank, self._count))

    def _end(self, rank: int, task: Task, now: float) -> float:
        duration = self._price(rank, task)
        if not duration.link or task.operation.role is Role.LOCAL:
            return now + duration.seconds
        self._link = max(now + duration.seconds, self._link + duration.link)
        return self._link


def play_on_clock(programs: Mapping[int, StepProgram], threads: Mapping[str, int], costs: Costs) -> list[TaskSpan]:
    """Return the begin and end of each task, with the same costs on every rank."""
    return Clock(programs, threads, lambda _, task: task.operation.price(task, costs)).run()


class TimeRange(Protocol):
    """Span of time."""

    @property
    def begin(self) -> float:
        """Seconds."""
        ...

    @property
    def end(self) -> float:
        """Seconds."""
        ...


Range = TypeVar("Range", bound=TimeRange)


def tracks(spans: Iterable[Range]) -> list[list[Range]]:
    """Return spans laid out so that no two overlap on a track, each on the first that is free, in order of time. A span
    may begin when the one before it on its track ends.

        │── 1 ──│           track 0   │── 1 ──│── 3 ──│
            │── 2 ──│       track 1       │── 2 ──│
                │── 3 ──│
    """
    found: list[list[Range]] = []
    for span in sorted(spans, key=lambda one: (one.begin, one.end)):
        free = next((track for track in found if track[-1].end <= span.begin), None)
        if free is None:
            found.append([span])
        else:
            free.append(span)
    return found
