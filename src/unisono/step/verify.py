"""Proof that a rule's step programs are right for one number of ranks: they are played on symbols in an order they
allow.

    rank 0   ... pack 1 ─▶ allreduce 1 ─▶ settle 1 ─▶ update 1 ...
    rank 1   ... pack 1 ─▶     ┴─ one node of the joined graph

Checked, in time linear in the number of tasks:

- every member of a group has the same collectives, in the same order;
- a group's tasks are totally ordered on each member: each shares a value with the next, which one of them writes;
- a lane has a thread for each group it may wait for;
- the ranks' graphs, joined at collectives, have no cycle;
- in a random admissible order, each gradient is applied once, complete, to the weights it was made with, and the ranks
  end with the same weights, where the rule promises so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from itertools import pairwise

from unisono.errors import StepError
from unisono.step.admissible import play_in_some_order
from unisono.step.layout import Layout
from unisono.step.matching import Member
from unisono.step.program import Group, Role, Step, StepProgram, Task
from unisono.step.rule import Promise, Rule, Whose
from unisono.step.symbols import Symbols, Versions


def verify(
    rule: Rule,
    layout: Layout,
    steps: Sequence[Step],
    seed: int = 0,
    absent: Mapping[int, Set[int]] | None = None,
) -> None:
    """Raise StepError unless the rule keeps its promises over these steps on `layout.ranks` ranks.

    `absent` maps a rank to the batches that it lacks; `seed` chooses among the orders that the programs allow.
    """
    programs = [[rule(event, rank, layout) for event in steps] for rank in range(layout.ranks)]
    whole = [tuple(task for program in mine for task in program) for mine in programs]
    for rank, program in enumerate(whole):
        check_groups(rank, program)
        check_threads(rank, program, rule.threads())
    check_same_collectives(whole)
    missing = absent or {}
    versions = Versions()
    symbols = [Symbols(rank, layout, versions, frozenset(missing.get(rank, ()))) for rank in range(layout.ranks)]

    def carry(together: Sequence[Member]) -> None:
        task = together[0].task
        task.operation.mean([symbols[one.rank] for one in together], task)

    play_in_some_order(whole, carry, seed)
    check_promises(rule, steps, symbols)


def check_groups(rank: int, program: StepProgram) -> None:
    """Raise StepError unless each group's tasks are totally ordered by values."""
    members: defaultdict[Group, list[Task]] = defaultdict(list)
    for task in program:
        if task.group is None:
            if task.operation.role is not Role.ALONE:
                raise StepError(f"rank {rank}: {task} has no group: say which ranks it is with")
            continue
        if rank not in task.group.ranks:
            raise StepError(f"rank {rank}: {task} is of the group {task.group.ranks}, which it is not in")
        members[task.group].append(task)
    for group, tasks in members.items():
        for one, other in pairwise(tasks):
            touched = {*other.reads, *other.writes}
            if not (touched.intersection(one.writes) or set(other.writes).intersection(one.reads)):
                raise StepError(
                    f"rank {rank}: {one} (lane {one.lane}) and {other} (lane {other.lane}) share communicator "
                    f"{group.number} of ranks {group.ranks}, but no value orders them: let both write an order value"
                )


def check_threads(rank: int, program: StepProgram, threads: Mapping[str, int]) -> None:
    """Raise StepError unless each lane has a thread for each group that it may wait for."""
    waits: defaultdict[str, dict[Group, Task]] = defaultdict(dict)
    for task in program:
        if task.lane not in threads:
            raise StepError(f"rank {rank}: {task} is on lane {task.lane!r}; the rule has {', '.join(threads)}")
        if task.group is not None:
            waits[task.lane].setdefault(task.group, task)
    for lane, groups in waits.items():
        if len(groups) > threads[lane]:
            names = ", ".join(map(str, groups.values()))
            raise StepError(
                f"rank {rank}: lane {lane} may wait for {len(groups)} groups at once ({names}) and has "
                f"{threads[lane]} threads: another rank may wait in the other order"
            )


def check_same_collectives(programs: Sequence[StepProgram]) -> None:
    """Raise StepError unless all members of each group have the same collectives in the same order."""
    found: list[defaultdict[Group, list[Task]]] = []
    for program in programs:
        mine: defaultdict[Group, list[Task]] = defaultdict(list)
        for task in program:
            if task.group is not None and task.operation.role is Role.COLLECTIVE:
                mine[task.group].append(task)
        found.append(mine)
    for rank, mine in enumerate(found):
        for group, tasks in mine.items():
            for other in group.ranks:
                _compare(rank, tasks, other, found[other].get(group, []))


def _compare(rank: int, tasks: Sequence[Task], other: int, theirs: Sequence[Task]) -> None:
    for number, (one, two) in enumerate(zip(tasks, theirs, strict=False)):
        if (one.operation, one.key) != (two.operation, two.key):
            raise StepError(f"collective {number} of their group is {one} on rank {rank}, and {two} on rank {other}")
    if len(theirs) < len(tasks):
        raise StepError(f"{tasks[len(theirs)]} of rank {rank} is missing on rank {other}")


def check_promises(rule: Rule, steps: Sequence[Step], symbols: Sequence[Symbols]) -> None:
    """Raise StepError unless the applied gradients and the resulting weights are those that the rule promises."""
    promises = [rule.promise(event) for event in steps]
    windows: list[tuple[Promise, list[int]]] = []  # each update, and the batches that it is of
    batches: list[int] = []
    for number, promise in enumerate(promises):
        batches.append(number)
        if promise.applied is not None:
            windows.append((promise, batches))
            batches = []
    for one in symbols:
        for number in range(one.layout.parameters):
            for key in one.parts_of(number):
                _check_updates(one, symbols, number, key, windows)
    if promises and promises[-1].equal:
        for one in symbols[1:]:
            for number in range(one.layout.parameters):
                if one.version(number) != symbols[0].version(number):
                    raise StepError(f"ranks 0 and {one.rank} end with different weights of parameter {number}")


def _check_updates(
    one: Symbols, everyone: Sequence[Symbols], number: int, key: int, windows: Sequence[tuple[Promise, list[int]]]
) -> None:
    updates = one.applied.get((number, key), [])
    where = f"rank {one.rank}: parameter {number}"
    if len(updates) != len(windows):
        raise StepError(f"{where} is updated {len(updates)} times in {len(windows)} steps that should update it")
    for (promise, batches), update in zip(windows, updates, strict=True):
        whose = everyone if promise.applied is Whose.ALL else [one]
        wanted = {(rank.rank, batch) for rank in whose for batch in batches if batch not in rank.absent}
        found = {(contribution.rank, contribution.batch) for contribution in update.sum}
        if missing := sorted(wanted - found):
            raise StepError(
                f"{where}: the update of batch {batches[-1]} lacks the gradients of (rank, batch) {missing}"
            )
        if strange := sorted(found - wanted):
            raise StepError(f"{where}: the update of batch {batches[-1]} has gradients of (rank, batch) {strange}")
        for contribution, count in update.sum.items():
            if count != 1:
                raise StepError(f"{where}: rank {contribution.rank}'s gradient counts {count} times")
            if promise.fresh and contribution.version != update.version:
                raise StepError(
                    f"{where}: rank {contribution.rank}'s gradient of batch {contribution.batch} is stale: it was made "
                    "with other weights than it is applied to"
                )
