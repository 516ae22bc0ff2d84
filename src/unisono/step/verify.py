"""Proof that a rule's step programs are right for one number of ranks: they are played on symbolic values in an
order that they allow.

    rank 0   ... pack 1 ─▶ allreduce 1 ─▶ set_grads 1 ─▶ update 1 ...
    rank 1   ... pack 1 ─▶     ┴─ one node of the joined graph

Checked, in time linear in the number of tasks:

- every member of a group has the same collectives, in the same order;
- a group's tasks are totally ordered on each member: each shares with the next a value that one of them writes;
- a lane has a thread for each group it may wait for;
- the ranks' graphs, joined at collectives, have no cycle;
- in a random admissible order, each gradient is applied once, complete, to the weights it was made with, and the ranks
  end with the same weights, where the rule guarantees that;
- ranks end with the same anchors, and each bucket has had its outer steps, each with the changes of all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from itertools import pairwise

from unisono.errors import StepError
from unisono.step.layout import Layout
from unisono.step.predict import Member, play_in_random_order
from unisono.step.program import RankGroup, Role, Step, StepProgram, Task, Value, thread
from unisono.step.rule import BaseRule, GradientSource, Guarantee
from unisono.step.symbolic_state import Stage, SymbolicState, Versions


def verify(
    rule: BaseRule,
    layout: Layout,
    steps: Sequence[Step],
    seed: int = 0,
    absent: Mapping[int, Set[int]] | None = None,
) -> None:
    """Raise StepError unless the rule's guarantees hold over these steps on `layout.ranks` ranks.

    An asynchronous rule's servers serve in a random order. `absent` maps a rank to the batches that it lacks; `seed`
    chooses among the orders that the programs allow.
    """
    programs, training = rule.programs(layout, steps, seed), rule.seats(layout.ranks).workers
    for rank, program in enumerate(programs):
        check_groups(rank, program)
        if rank < training:  # a server serves one exchange after another, each when it has come
            check_threads(rank, program, rule.threads())
    check_same_collectives(programs)
    missing, versions = absent or {}, Versions()
    states = [SymbolicState(rank, layout, versions, frozenset(missing.get(rank, ()))) for rank in range(len(programs))]

    def carry(together: Sequence[Member]) -> None:
        task = together[0].task
        task.operation.symbolic([states[member.rank] for member in together], task)

    play_in_random_order(programs, carry, seed)
    guarantees = [rule.guarantee(event) for event in steps]
    check_guarantees(guarantees, states[:training])
    check_outer_steps(guarantees, states[:training])
    for state in states:
        left = [key for key, held in state.buckets.items() if held.stage in (Stage.UPDATED, Stage.GATHERED)]
        if state.received or left:
            raise StepError(
                f"rank {state.rank}: what came for buckets {sorted(state.received)}, and the updated weights of "
                f"buckets {left}, was not used"
            )


def check_groups(rank: int, program: StepProgram) -> None:
    """Raise StepError unless each group's tasks are totally ordered by values."""
    members: defaultdict[RankGroup, list[Task]] = defaultdict(list)
    for task in program:
        if task.group is None:
            if task.operation.role is not Role.LOCAL:
                raise StepError(f"rank {rank}: {task} has no group: name the ranks that take part")
            continue
        if rank not in task.group.ranks:
            raise StepError(f"rank {rank}: {task} is of the group {task.group.ranks}, which it is not in")
        members[task.group].append(task)
    for group, tasks in members.items():
        for before, after in pairwise(tasks):
            touched = {*after.reads, *after.writes}
            if not (touched.intersection(before.writes) or set(after.writes).intersection(before.reads)):
                raise StepError(
                    f"rank {rank}: {before} (lane {before.lane}) and {after} (lane {after.lane}) share communicator "
                    f"{group.number} of ranks {group.ranks}, but no value orders them: let both write an order value"
                )


def check_threads(rank: int, program: StepProgram, threads: Mapping[str, int]) -> None:
    """Raise StepError unless each lane has a thread for each group that it may wait for."""
    waits: defaultdict[str, dict[RankGroup | Value, Task]] = defaultdict(dict)
    for task in program:
        if task.lane not in threads:
            raise StepError(f"rank {rank}: {task} is on lane {task.lane!r}; the rule has {', '.join(threads)}")
        if task.group is not None:
            orders = (value for value in task.writes if value.kind == "order")
            waited = thread(task.lane) if thread(task.lane) in task.writes else next(orders, task.group)
            waits[task.lane].setdefault(waited, task)  # one order for several groups: one at a time
    for lane, groups in waits.items():
        if len(groups) > threads[lane]:
            names = ", ".join(map(str, groups.values()))
            raise StepError(
                f"rank {rank}: lane {lane} may wait for {len(groups)} groups at once ({names}) and has "
                f"{threads[lane]} threads: another rank may wait in the other order"
            )


def check_same_collectives(programs: Sequence[StepProgram]) -> None:
    """Raise StepError unless all members of each group have the same collectives in the same order."""
    collectives: list[defaultdict[RankGroup, list[Task]]] = [defaultdict(list) for _ in programs]
    for of_rank, program in zip(collectives, programs, strict=True):
        for task in program:
            if task.group is not None and task.operation.role is Role.COLLECTIVE:
                of_rank[task.group].append(task)
    for rank, of_rank in enumerate(collectives):
        for group, tasks in of_rank.items():
            for peer in group.ranks:
                _compare(rank, tasks, peer, collectives[peer].get(group, []))


def _compare(rank: int, tasks: Sequence[Task], peer: int, theirs: Sequence[Task]) -> None:
    for place, (task, its) in enumerate(zip(tasks, theirs, strict=False)):
        if (task.operation, task.key) != (its.operation, its.key):
            raise StepError(f"collective {place} of their group is {task} on rank {rank}, and {its} on rank {peer}")
    if len(theirs) < len(tasks):
        raise StepError(f"{tasks[len(theirs)]} of rank {rank} is missing on rank {peer}")


UpdateWindow = tuple[Guarantee, list[int]]
"""Guarantee of a step that makes an update, and the batches of that update."""


def check_guarantees(guarantees: Sequence[Guarantee], states: Sequence[SymbolicState]) -> None:
    """Raise StepError unless the applied gradients and the resulting weights are those that the steps guarantee."""
    windows, batches = list[UpdateWindow](), list[int]()
    for step, guarantee in enumerate(guarantees):
        batches.append(step)
        if guarantee.applied is not None:
            windows.append((guarantee, batches))
            batches = []
    for state in states:
        for parameter, parts in state.weights.items():
            for key, version in parts.items():
                group = state.layout.group_of(key, state.rank)
                _check_updates(state, [member for member in states if member.rank in group], parameter, key, windows)
                if guarantees and guarantees[-1].equal and version != states[group[0]].weights[parameter][key]:
                    raise StepError(
                        f"ranks {group[0]} and {state.rank} end with different weights of parameter {parameter}"
                    )


def check_outer_steps(guarantees: Sequence[Guarantee], states: Sequence[SymbolicState]) -> None:
    """Raise StepError unless all ranks have the same anchors, and each bucket as many outer steps as are guaranteed."""
    least = sum(guarantee.outer for guarantee in guarantees)
    most = least if guarantees and guarantees[-1].outer else least + 1  # one may have been taken since
    for state in states:
        for key in state.layout.keys:
            for parameter in state.layout.bucket(key).parameters:
                if state.anchor((parameter, key)) != states[0].anchor((parameter, key)):
                    raise StepError(f"ranks 0 and {state.rank} end with different anchors of parameter {parameter}")
            if not least <= state.outer_steps[key] <= most:
                raise StepError(
                    f"rank {state.rank}: bucket {key} has had {state.outer_steps[key]} outer steps in "
                    f"{len(guarantees)} steps, which should take {least}"
                )


def _check_updates(
    state: SymbolicState, holders: Sequence[SymbolicState], parameter: int, key: int, windows: Sequence[UpdateWindow]
) -> None:
    updates = state.applied.get((parameter, key), [])
    where = f"rank {state.rank}: parameter {parameter}"
    if len(updates) != len(windows):
        raise StepError(f"{where} is updated {len(updates)} times in {len(windows)} steps that should update it")
    for (guarantee, batches), (contributions, version) in zip(windows, updates, strict=True):
        whose = holders if guarantee.applied is GradientSource.ALL else [state]
        wanted = {(rank.rank, batch) for rank in whose for batch in batches if batch not in rank.absent}
        applied = {(contribution.rank, contribution.batch) for contribution in contributions}
        update = f"{where}: the update of batch {batches[-1]}"
        if missing := sorted(wanted - applied):
            raise StepError(f"{update} lacks the gradients of (rank, batch) {missing}")
        if strange := sorted(applied - wanted):
            raise StepError(f"{update} has gradients of (rank, batch) {strange}")
        for contribution, count in contributions.items():
            if count != 1:
                raise StepError(f"{where}: rank {contribution.rank}'s gradient counts {count} times")
            if guarantee.fresh and contribution.version != version:
                raise StepError(
                    f"{where}: rank {contribution.rank}'s gradient of batch {contribution.batch} is stale: it was made "
                    "with other weights than it is applied to"
                )
