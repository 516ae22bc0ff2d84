"""Prediction of a step once steps follow one another: the rule's own programs on a clock with measured costs.

    main            ──backward──────────▶│    waits for w0   │──forward──▶
    communication        │ allreduce 1 │ allreduce 2 │ allreduce 3 │
    update                            │ update 1 │ update 2 ...

A device copies to the host and from it on a stream each. There these copies have lanes of their own:

    main            ──backward──────────▶│
    to_host            │ pack 1 │ pack 2 │ pack 3 │
    communication               │ allreduce 1 │ allreduce 2 │ allreduce 3 │
    to_device                                 │ set_grads 1 │ set_grads 2 │ set_grads 3 │

With costs the clock gives the begin and end of each task, with random durations an order that the programs allow:

    lanes       a task waits for what it touches, then for a thread of its lane
    groups      a collective begins when all its members have arrived; each keeps its thread meanwhile
    the link    concurrent collectives share it: together they are no faster than one after another, but for
                their latency
    the cores   while computing and a collective run at once, each goes at the rate of `Computing.beside`, here 0.5:
                    computing   4 s alone   │──── 2 ────│── 3 ──│      4 s for the first 2, 2 s for the rest
                    allreduce   2 s alone   │──── 2 ────│              4 s

Tasks of different ranks are one collective, or one message, by rule 3 of `program.py`:

    rank 0   allreduce 1 ──┐        allreduce 2 ─┐           send 1 to 2 ───┐
    rank 1   allreduce 1 ──┤ first  allreduce 2 ─┤ second                   │
    rank 2   allreduce 1 ──┘        allreduce 2 ─┘           receive 1 ─────┘

Ranks that are not played are assumed to do the same as the first one that is played, at the same time.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from operator import attrgetter
from typing import NamedTuple, Protocol, TypeVar

from unisono.errors import StepError
from unisono.step import operations as op
from unisono.step.costs import Costs, Duration, Prediction
from unisono.step.program import Price, RankGroup, Role, Step, StepProgram, Task, dependencies
from unisono.step.rule import BaseRule

STREAMS: Mapping[Price, str] = {op.price_pack: "to_host", op.price_unpack: "to_device"}
"""Lanes of copies between a device and the host, by the price of the operation."""

WARMUP_STEPS = 4
"""Smallest number of steps that are played before measuring: in the first, nothing is pending."""


def predict(rule: BaseRule, costs: Costs) -> Prediction:
    """Return the predicted times of a step, as the mean over one period of the rule. All ranks are assumed alike."""
    programs, spans = _play(rule, costs)
    period, warmup = len(programs), _warmup(len(programs))
    begins = sorted(span.begin for span in spans if span.task.operation is op.BEGIN)
    step = (begins[warmup + period] - begins[warmup]) / period
    tasks = (task for program in programs for task in program)
    sends = (task for task in tasks if task.operation.role is not Role.LOCAL and task.operation is not op.BARRIER)
    communicating = sum(task.operation.price(task, costs).seconds for task in sends) / period
    return Prediction(step, communicating, step - costs.computing.whole)


def steady_step(rule: BaseRule, costs: Costs) -> list[TaskSpan]:
    """Return the spans of the tasks of one step, in seconds since it began, in the order in which they end.

    The step is the first of a period, once steps follow one another. Tasks may end after the next step has begun.
    """
    programs, spans = _play(rule, costs)
    first = sum(len(programs[step % len(programs)]) for step in range(_warmup(len(programs))))
    steady = [span for span in spans if first <= span.place < first + len(programs[0])]
    began = next(span.begin for span in steady if span.task.operation is op.BEGIN)
    return [span._replace(place=span.place - first, begin=span.begin - began, end=span.end - began) for span in steady]


def _warmup(period: int) -> int:
    """Return the number of steps before those that are measured: whole periods."""
    return max(WARMUP_STEPS - period, -(-WARMUP_STEPS // period) * period if period > 1 else 0)


def _play(rule: BaseRule, costs: Costs) -> tuple[list[StepProgram], list[TaskSpan]]:
    """Return the programs of a period, and the spans of the warm-up, of a period, and of the first step after it."""
    period = rule.traits.period
    programs = [on_streams(rule(Step(step), 0, costs.layout), costs) for step in range(period)]
    played = tuple(task for step in range(_warmup(period) + period + 1) for task in programs[step % period])
    threads = {**rule.threads(), **dict.fromkeys(STREAMS.values(), 1)}
    clock = Clock(
        {0: played}, threads, lambda _, task: task.operation.price(task, costs), beside=costs.computing.beside
    )
    return programs, clock.run()


def on_streams(program: StepProgram, costs: Costs) -> StepProgram:
    """Return the program with copies between a device and the host on the lanes of their streams, where it has any."""
    if not costs.computing.streams:
        return program
    return tuple(task._replace(lane=STREAMS.get(task.operation.price, task.lane)) for task in program)


class Member(NamedTuple):
    """Task that a rank has reached; `place` is its index in its rank's program."""

    rank: int
    task: Task
    place: int = 0


Carry = Callable[[Sequence[Member]], None]
"""Called with a task, or with all members' tasks of a collective, when it has ended."""


class TaskSpan(NamedTuple):
    """Begin and end of a task; `place` is its index in its rank's program."""

    rank: int
    place: int
    task: Task
    begin: float
    end: float


class _Matching:
    """Collector of the tasks that ranks reach. It returns those that run together."""

    def __init__(self, ranks: Collection[int]) -> None:
        self._ranks = frozenset(ranks)
        self._arrived: defaultdict[RankGroup, defaultdict[int, deque[Member]]] = defaultdict(lambda: defaultdict(deque))
        self._messages: defaultdict[RankGroup, list[Member]] = defaultdict(list)

    def arrive(self, member: Member) -> Sequence[Member]:
        """Add a task that its rank has reached. Return all tasks that run together now, or none yet."""
        group, role = member.task.group, member.task.operation.role
        if group is None or role is Role.LOCAL:
            return (member,)
        if role is not Role.COLLECTIVE:
            return self._message(self._messages[group], member)
        arrived, members = self._arrived[group], [rank for rank in group.ranks if rank in self._ranks]
        arrived[member.rank].append(member)
        return [arrived[rank].popleft() for rank in members] if all(arrived[rank] for rank in members) else ()

    def waiting(self) -> list[str]:
        """Return a description of each rank that waits and its task."""
        members = [member for arrived in self._arrived.values() for queue in arrived.values() for member in queue]
        members += [member for waiting in self._messages.values() for member in waiting]
        return [f"rank {member.rank} in {member.task}" for member in members]

    def _message(self, waiting: list[Member], member: Member) -> Sequence[Member]:
        if member.task.peer is not None and member.task.peer not in self._ranks:
            return (member,)
        sends = member.task.operation.role is Role.SEND
        for place, partner in enumerate(waiting):
            fits = partner.task.peer in (None, member.rank) and member.task.peer in (None, partner.rank)
            if fits and (partner.task.operation.role is Role.SEND) != sends:
                del waiting[place]
                return (member, partner) if sends else (partner, member)
        waiting.append(member)
        return ()


class Clock:
    """Player of one program per rank. `run` returns the spans, in the order in which they end."""

    def __init__(
        self,
        programs: Mapping[int, StepProgram],
        threads: Mapping[str, int],
        price: Callable[[int, Task], Duration],
        carry: Carry | None = None,
        beside: float = 1.0,
    ) -> None:
        """Prepare a run. `price` returns the duration of a rank's task; `carry` is called with the tasks that end
        together, in order of time. `beside`: `Computing.beside`."""
        self._programs, self._price, self._carry = programs, price, carry
        waits = {rank: dependencies(program) for rank, program in programs.items()}
        self._open = {rank: [len(before) for before in of_rank] for rank, of_rank in waits.items()}
        self._after: dict[int, list[list[int]]] = {rank: [[] for _ in program] for rank, program in programs.items()}
        for rank, of_rank in waits.items():
            for place, before in enumerate(of_rank):
                for earlier in before:
                    self._after[rank][earlier].append(place)
        self._free = {(rank, lane): count for rank in programs for lane, count in threads.items()}
        self._queues: defaultdict[tuple[int, str], list[tuple[float, int]]] = defaultdict(list)
        self._matching = _Matching(programs)
        self._link = 0.0  # when it is free
        self._beside, self._rate = beside, 1.0  # the present rate
        # end, place in the program and rank of the first member, order in which they were added, begin, members
        self._events: list[tuple[float, int, int, int, float, Sequence[Member]]] = []
        self._count = 0

    def run(self) -> list[TaskSpan]:
        """Play all tasks, and return their spans. Raises StepError for a deadlock of ranks."""
        spans: list[TaskSpan] = []
        for rank, waits in self._open.items():
            for place, count in enumerate(waits):
                if not count:
                    self._enter(rank, place, 0.0)
        for rank in self._programs:
            self._dispatch(rank, 0.0, [lane for owner, lane in self._free if owner == rank])
        self._share_cores(0.0)
        while self._events:
            now, _, _, _, begin, together = heappop(self._events)
            if self._carry is not None:
                self._carry(together)
            for member in together:
                spans.append(TaskSpan(member.rank, member.place, member.task, begin, now))
                self._end(member, now)
            self._share_cores(now)
        if len(spans) < sum(map(len, self._programs.values())):
            waiting = ", ".join(self._matching.waiting()) or "tasks of one rank"
            raise StepError(f"deadlock: {waiting}")
        return spans

    def _enter(self, rank: int, place: int, now: float) -> None:
        heappush(self._queues[rank, self._programs[rank][place].lane], (now, place))

    def _end(self, member: Member, now: float) -> None:
        """Let the tasks begin that have waited for this one, or for its thread."""
        rank, lanes = member.rank, {member.task.lane: None}  # in the order of the program: the same on every run
        self._free[rank, member.task.lane] += 1
        for follower in self._after[rank][member.place]:
            self._open[rank][follower] -= 1
            if not self._open[rank][follower]:
                self._enter(rank, follower, now)
                lanes[self._programs[rank][follower].lane] = None
        self._dispatch(rank, now, lanes)

    def _dispatch(self, rank: int, now: float, lanes: Iterable[str]) -> None:
        """Assign ready tasks to the free threads of some lanes."""
        for lane in lanes:
            queue = self._queues[rank, lane]
            while queue and self._free[rank, lane]:
                _, place = heappop(queue)
                self._free[rank, lane] -= 1
                together = self._matching.arrive(Member(rank, self._programs[rank][place], place))
                if together:
                    first = together[0]
                    self._count += 1
                    end = self._end_of(first, now)
                    heappush(self._events, (end, first.place, first.rank, self._count, now, together))

    def _end_of(self, member: Member, now: float) -> float:
        seconds, link = (part / self._rate for part in self._price(member.rank, member.task))
        if not link or member.task.operation.role is Role.LOCAL:
            return now + seconds
        self._link = max(now + seconds, self._link + link)
        return self._link

    def _share_cores(self, now: float) -> None:
        """Change the rate of what runs, if computing and a collective run at once from now on, or no longer do."""
        if self._beside == 1.0:
            return
        kinds = {event[-1][0].task.operation.role is Role.LOCAL for event in self._events if event[0] > now}
        rate = self._beside if len(kinds) > 1 else 1.0
        if rate != self._rate:
            longer = self._rate / rate
            self._rate, self._link = rate, now + (self._link - now) * longer
            # all by the same factor: their order stays
            self._events = [(now + (event[0] - now) * longer, *event[1:]) for event in self._events]


def play_in_random_order(programs: Sequence[StepProgram], carry: Carry, seed: int = 0) -> None:
    """Play one program per rank, each task after those it waits for, in one of the orders that they allow.

    `seed` draws durations of many magnitudes, so that any task may be late. Raises StepError where ranks are
    deadlocked.
    """
    chance = random.Random(seed)
    unlimited = Counter(task.lane for program in programs for task in program)
    ranks = chance.sample(range(len(programs)), len(programs))  # who begins first
    mixed = {rank: programs[rank] for rank in ranks}
    Clock(mixed, unlimited, lambda *_: Duration(10 ** chance.uniform(0, 9)), carry).run()


class TimeRange(Protocol):
    """Span of time, in seconds."""

    @property
    def begin(self) -> float: ...

    @property
    def end(self) -> float: ...


Range = TypeVar("Range", bound=TimeRange)


def tracks(spans: Iterable[Range]) -> list[list[Range]]:
    """Return spans laid out so that no two overlap on a track, each on the first that is free, in order of time. A span
    may begin when the one before it on its track ends.

        │── 1 ──│           track 0   │── 1 ──│── 3 ──│
            │── 2 ──│       track 1       │── 2 ──│
                │── 3 ──│
    """
    laid_out: list[list[Range]] = []
    for span in sorted(spans, key=attrgetter("begin", "end")):
        free = next((track for track in laid_out if track[-1].end <= span.begin), None)
        if free is None:
            laid_out.append([span])
        else:
            free.append(span)
    return laid_out
