"""Every rule passes for any number of ranks and buckets; a program that is broken in any way is refused by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import StepError
from unisono.placement import Partition, place
from unisono.rules import BSP, Exchange, LocalSGD, Sharded
from unisono.step import build
from unisono.step import operations as op
from unisono.step.layout import ActivationExchange, Bucket, Layout, Updates, even_layout
from unisono.step.overlaps import OVERLAPS
from unisono.step.program import (
    COMMUNICATION,
    MAIN,
    UPDATE,
    Operation,
    RankGroup,
    Role,
    Step,
    StepProgram,
    Task,
    Value,
    bucket,
    dependencies,
    order,
)
from unisono.step.symbolic_state import Contents, Contribution, Stage, SymbolicState, Versions
from unisono.step.verify import check_guarantees, verify

STEPS = [Step(0), Step(1), Step(2, synchronize=False), Step(3)]


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("ranks", range(1, 10))
def test_rules_keep_their_guarantees(overlap: str, ranks: int) -> None:
    for buckets in (1, 2, 3, 5, 16):
        verify(BSP(overlap=overlap), even_layout(ranks, buckets), STEPS, seed=buckets)
        every = 1 + buckets % 3
        verify(
            LocalSGD(overlap=overlap, every=every), even_layout(ranks, buckets), [Step(0), Step(1), Step(2)], buckets
        )


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("make", [BSP, Sharded])
def test_exact_sums_are_of_gradients_that_all_ranks_have_measured(
    make: type[BSP] | type[Sharded], overlap: str
) -> None:
    rule = make(Exchange(wire="exact"), overlap=overlap)
    for ranks, buckets in ((1, 2), (3, 1), (4, 5)):
        verify(rule, even_layout(ranks, buckets), STEPS, seed=buckets)


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        ("exponents", "rank . pack 1 needs exponents of all ranks' gradients in bucket 1, which holds magnitudes"),
        ("measure", "rank . exponents 1 needs magnitudes of this rank's gradients in bucket 1, which holds nothing"),
    ],
)
def test_integers_without_agreed_exponents_are_refused(left_out: str, message: str) -> None:
    class Hasty(BSP):
        def follow(self, event: Step, rank: int, layout: Layout) -> build.Followers:
            for key, tasks in super().follow(event, rank, layout):
                yield key, [task for task in tasks if task.operation.name != left_out]

    with pytest.raises(StepError, match=message.replace("rank .", "rank .:")):
        verify(Hasty(Exchange(wire="exact")), even_layout(2, 1), [Step(0)])


def test_integers_of_gradients_of_another_batch_are_refused() -> None:
    """The exponents of the last step, which a rule would use again: a gradient may not fit them."""
    state = SymbolicState(0, even_layout(1, 1), Versions())
    task = Task(op.EXACT[op.PACK][1], 1, UPDATE)
    state.buckets[1] = Contents(Stage.EXPONENTS, {0: Counter({Contribution(0, 0, 0): 1})})
    state.gradients[0], state.made[0], state.control = {1: Counter({Contribution(0, 1, 0): 1})}, 1, 1
    with pytest.raises(StepError, match="pack 1 makes integers of a gradient of parameter 0 that was not measured"):
        task.operation.symbolic([state], task)


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("ranks", [2, 4, 6])
@pytest.mark.parametrize("make", [BSP, Sharded])
def test_buckets_of_split_parameters_are_averaged_over_the_ranks_that_hold_them(
    make: type[BSP] | type[Sharded], overlap: str, clip: float | None, norms: bool, ranks: int
) -> None:
    """Bucket 2 is split over two ranks, bucket 3 over all."""
    pairs = tuple(tuple(range(part, ranks, 2)) for part in range(2))
    alone = tuple((rank,) for rank in range(ranks))
    sent = (Bucket(64, (3,)), Bucket(64, (2,), groups=pairs), Bucket(64, (1,), groups=alone), Bucket(64, (0,)))
    layout = Layout(ranks, 4, sent, clip=clip, buffers=True, layer_norms=norms)
    rule = make(overlap=overlap)
    verify(rule, layout, STEPS, seed=ranks)
    programs = [rule(Step(0), rank, layout) for rank in range(ranks)]
    groups = {task.group.ranks for program in programs for task in program if task.group is not None}
    assert groups == {tuple(range(ranks)), *pairs, *alone}


SPLIT = Layout(
    4,
    3,
    (
        Bucket(64, (2,), groups=((0,), (1,), (2,), (3,))),
        Bucket(64, (1,), groups=((0, 2), (1, 3))),
        Bucket(64, (0,)),
    ),
    activations=(
        ActivationExchange(1, 10, ((0, 1), (2, 3))),
        ActivationExchange(1, 5, ((0, 1), (2, 3)), after=True),
        ActivationExchange(2, 10, ((0, 1, 2, 3),)),
        ActivationExchange(2, 10, ((0, 1, 2, 3),), backward=True),
        ActivationExchange(1, 5, ((0, 1), (2, 3)), backward=True),
        ActivationExchange(1, 10, ((0, 1), (2, 3)), backward=True, after=True),
    ),
)
"""Layer 1 is split over pairs of 4 ranks, layer 2 over all of them."""


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("deferred", [True, False])
def test_activations_are_exchanged_around_the_products_of_split_layers(overlap: str, deferred: bool) -> None:
    layout = replace(SPLIT, deferred=deferred)
    verify(BSP(overlap=overlap), layout, STEPS)
    program = BSP(overlap=overlap)(Step(0), 3, layout)
    shown = (op.FORWARD, op.ACTIVATIONS, op.BACKWARD)
    assert ", ".join(str(task) for task in program if task.operation in shown) == (
        "forward 0, activations 0, forward 1, activations 1, activations 2, forward 2, "
        "backward 0, activations 3, backward 1, activations 4, backward 2, activations 5, backward 3"
    )
    assert [task.group.ranks for task in program if task.operation is op.ACTIVATIONS and task.group] == [
        *[(2, 3)] * 2,
        *[(0, 1, 2, 3)] * 2,
        *[(2, 3)] * 2,
    ]


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_sharded_updates_are_one_file(ranks: int) -> None:
    for buckets in (1, 3, 8):
        verify(Sharded(), even_layout(ranks, buckets), [Step(0), Step(1), Step(2)], seed=buckets)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Buckets of several parameters and of parts of one, which fill in another order than they are sent in."""
    count, buckets, left = draw(st.integers(1, 6)), list[Bucket](), 0
    while left < count:
        members = tuple(range(left, min(count, left + draw(st.integers(1, 3)))))
        parts = draw(st.integers(1, 3)) if len(members) == 1 else 1
        buckets += [Bucket(64, members)] * parts
        left += len(members)
    filled = tuple(draw(st.permutations(range(1, len(buckets) + 1))))
    layout = Layout(draw(st.integers(1, 4)), count, tuple(buckets), filled, tuple(draw(st.permutations(range(count)))))
    updates = draw(st.sampled_from(Updates))
    deferred = updates is not Updates.OUTSIDE and draw(st.booleans())
    clip = draw(st.sampled_from([None, 1.0])) if updates is not Updates.OUTSIDE else None
    norms, buffers = draw(st.booleans()), draw(st.booleans())
    nodes = place(draw(st.lists(st.integers(0, 2), min_size=layout.ranks, max_size=layout.ranks))).nodes
    layout = replace(layout, updates=updates, deferred=deferred, clip=clip, layer_norms=norms, buffers=buffers)
    return replace(layout, nodes=nodes)


@given(
    layouts(),
    st.sampled_from([BSP(), LocalSGD(every=1), LocalSGD(every=2), Sharded(), Sharded(clip=1.0)]),
    st.sampled_from(sorted(OVERLAPS)),
    st.integers(1, 4),
    st.lists(st.booleans(), max_size=4),
    st.integers(0, 1 << 20),
    st.sets(st.tuples(st.integers(0, 3), st.integers(0, 4))),
)
def test_random_layouts_and_missing_batches(
    layout: Layout,
    rule: BSP | LocalSGD | Sharded,
    overlap: str,
    outstanding: int,
    synchronize: list[bool],
    seed: int,
    absent: set[tuple[int, int]],
) -> None:
    steps = [Step(step, synchronizes) for step, synchronizes in enumerate([*synchronize, True])]
    missing = {rank: {batch for absentee, batch in absent if absentee == rank} for rank in range(layout.ranks)}
    verify(replace(rule, overlap=overlap, outstanding=outstanding), layout, steps, seed, missing)


def test_parts_of_a_parameter_may_be_averaged_before_and_after_the_next_batch() -> None:
    parts = tuple(Bucket(64, (parameter,)) for parameter in (0, 1, 1, 1))
    for seed in range(30):
        verify(LocalSGD(every=1), Layout(2, 2, parts), [Step(0), Step(1)], seed)


Change = Callable[[int, StepProgram], Iterable[Task]]


@dataclass(frozen=True)
class Broken(BSP):
    """BSP whose programs were changed, by rank."""

    change: Change = lambda _, program: program

    def __call__(self, event: Step, rank: int, layout: Layout) -> StepProgram:
        return tuple(self.change(rank, super().__call__(event, rank, layout)))


def without(name: str, key: int, of_rank: int | None = None) -> Change:
    """Leave a task out."""
    return lambda rank, program: [t for t in program if str(t) != f"{name} {key}" or of_rank not in (None, rank)]


def changed(name: str, key: int, **fields: object) -> Change:
    """Give a task other fields."""
    return lambda _, program: [t._replace(**fields) if str(t) == f"{name} {key}" else t for t in program]  # type: ignore[arg-type]


def twice(name: str, key: int) -> Change:
    """Have a task carried out twice."""
    return lambda _, program: [task for t in program for task in ([t, t] if str(t) == f"{name} {key}" else [t])]


def other_order(rank: int, program: StepProgram) -> Iterable[Task]:
    """Rank 1 sends buckets 1 and 2 the other way round."""
    if rank != 1:
        return program
    behind = {"allreduce 1", "set_grads 1", "update 1"}
    kept = [t for t in program if str(t) not in behind]
    place = next(n for n, t in enumerate(kept) if str(t) == "update 2") + 1
    return [*kept[:place], *(t for t in program if str(t) in behind), *kept[place:]]


def stale(_: int, program: StepProgram) -> Iterable[Task]:
    """The forward pass reads the weights of parameter 2, and not those that it is about."""
    return [
        t._replace(reads=(Value("weights", 2),)) if t.operation is op.FORWARD and t.key == 1 else t for t in program
    ]


def before_grad_input(_: int, program: StepProgram) -> Iterable[Task]:
    """The weights of bucket 2 are updated before its input gradient is computed."""
    late = next(t for t in program if str(t) == "grad_input 2")
    rest = [t for t in program if t is not late]
    place = next(n for n, t in enumerate(rest) if str(t) == "update 2") + 1
    return [*rest[:place], late, *rest[place:]]


def two_lanes(_: int, program: StepProgram) -> Iterable[Task]:
    """Bucket 2 is sent by the main thread, beside bucket 1 on its own."""
    return [t._replace(lane=MAIN, writes=(bucket(2), order(1))) if str(t) == "allreduce 2" else t for t in program]


def circle(rank: int, program: StepProgram) -> Iterable[Task]:
    """Rank r waits for bucket 2 before it sends 1 on another communicator, the others the other way round."""
    group = RankGroup(tuple(range(3)), 1)
    allreduce_1, allreduce_2 = (next(t for t in program if str(t) == f"allreduce {key}") for key in (1, 2))
    first, second = allreduce_1._replace(group=group, writes=(bucket(1), order(7))), allreduce_2
    turn = Value("turn", 0)
    pair = [first._replace(writes=(*first.writes, turn)), second._replace(writes=(*second.writes, turn))]
    rest = [t for t in program if t.operation.name != "allreduce" or t.key > 2]
    place = next(n for n, t in enumerate(rest) if str(t) == "pack 2") + 1
    later = [t for t in rest if str(t) in ("set_grads 1", "update 1")]
    head, tail = [t for t in rest[:place] if t not in later], rest[place:]
    return [*head, *(pair if rank else reversed(pair)), *later, *tail]


REFUSED: dict[str, tuple[Change, str]] = {
    "updates twice": (
        twice("update", 2),
        "parameter 2 in bucket 2, which was applied before",
    ),
    "two lanes on one communicator": (two_lanes, r"allreduce 2 \(lane main\) .* no value orders them"),
    "a forward that reads nothing": (changed("forward", 1, reads=()), "forward 1 reads no weights"),
    "a collective that is missing on one rank": (without("allreduce", 3, of_rank=1), "on rank 1|allreduce 3"),
    "other orders on two ranks": (other_order, "is allreduce 1 on rank 0, and allreduce 2 on rank 1"),
    "a forward that reads other weights": (
        stale,
        "the weights of parameter 1, which the backward pass may still read|1 that are not those of the forward",
    ),
    "an update before the input gradient": (
        before_grad_input,
        "update 2 changes the weights of parameter 2, which the backward pass may still read",
    ),
    "an update beside the input gradient": (
        changed("grad_input", 2, reads=()),
        "update 2 changes the weights of parameter 2, which the backward pass may still read",
    ),
    "an input gradient that is missing": (
        without("grad_input", 2),
        "update 2 changes the weights of parameter 2, which the backward pass may still read",
    ),
    "an update that is missing": (without("update", 2), "parameter 2 is updated 0 times in 2 steps"),
    "an update before gradients are set": (
        without("set_grads", 2),
        "needs gradients that are set in bucket 2",
    ),
    "a bucket in which nothing was packed": (
        without("pack", 2),
        "allreduce 2 needs gradients .* in bucket 2, which holds",
    ),
    "a bucket that is not sent": (without("allreduce", 2), "lacks the gradients of .rank, batch. .*1, 0"),
    "a pack without a control message": (without("agree", 0), "pack 1 has no control message of its step"),
    "a lane without a thread for a group": (
        changed("allreduce", 2, group=RankGroup((0, 1, 2), 1), writes=(bucket(2), order(1))),
        "lane communication may wait for 2 groups at once .* has 1 threads",
    ),
    "a collective without a group": (changed("allreduce", 2, group=None), "allreduce 2 has no group"),
    "a group that a rank is not in": (
        changed("allreduce", 2, group=RankGroup((1, 2))),
        "rank 0: allreduce 2 is of the",
    ),
    "a lane that there is not": (changed("pack", 2, lane="packing"), "pack 2 is on lane 'packing'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_broken_program_is_refused_naming_the_wrong_task(name: str) -> None:
    change, message = REFUSED[name]
    layout = even_layout(3, 4)
    verify(BSP(), layout, [Step(0), Step(1)])
    with pytest.raises(StepError, match=message):
        for seed in range(20):
            verify(Broken(change=change), layout, [Step(0), Step(1)], seed)


def on_nodes(*sizes: int) -> Layout:
    """Three buckets on nodes of so many ranks."""
    nodes = place([node for node, size in enumerate(sizes) for _ in range(size)]).nodes
    return replace(even_layout(sum(sizes), 3), nodes=nodes, buffers=True)


@pytest.mark.parametrize("sizes", [(2, 2), (4, 4), (1, 3, 2), (1, 1, 1, 1), (4,)])
def test_phases_of_a_sum_keep_the_guarantees(sizes: tuple[int, ...]) -> None:
    layout = on_nodes(*sizes)
    exact = Exchange(wire="exact")
    for seed, rule in enumerate((BSP(), BSP(exact, scale="sum"), LocalSGD(every=2), LocalSGD(exact), Sharded())):
        verify(replace(rule, overlap="phases"), layout, STEPS, seed)
    programs = [BSP(overlap="phases")(Step(0), rank, layout) for rank in range(layout.ranks)]
    for node in layout.nodes:
        for rank in node:
            names = [task.operation.name for task in programs[rank] if task.group and task.key == 2]
            network = ["allreduce"] if rank == node[0] or not layout.phases else []
            parted = layout.phases and len(node) > 1
            assert names == (["node_sum", *network, "node_copy"] if parted else ["allreduce"])
    if not layout.phases:
        assert programs == [BSP(overlap="chain")(Step(0), rank, layout) for rank in range(layout.ranks)]


@pytest.mark.parametrize("nodes", [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0,), (1, 2, 3))])
def test_buckets_that_some_ranks_hold_have_no_phases(nodes: Partition) -> None:
    """Nodes may have the ranks that hold a part, or first ranks that do."""
    layout = replace(SPLIT, nodes=nodes)
    verify(BSP(overlap="phases"), layout, STEPS)
    parted = {task.key for task in BSP(overlap="phases")(Step(0), 1, layout) if task.operation is op.NODE_SUM}
    assert parted == {3}


def test_a_sum_waits_for_no_copy_of_another_bucket() -> None:
    program = BSP(overlap="phases")(Step(0), 0, on_nodes(2, 2))
    waits, names = dependencies(program), [str(task) for task in program]
    before = {names[index] for index in waits[names.index("node_sum 2")]}
    assert before == {"node_sum 1", "pack 2"}
    assert {names[index] for index in waits[names.index("allreduce 2")]} == {"allreduce 1", "node_sum 2"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("node_copy", 2), "rank [13]: set_grads 2 needs gradients in bucket 2, which holds nothing"),
        (without("allreduce", 2), r"rank .: parameter 1: .* lacks the gradients of .rank, batch. .\(2, 0\), \(3, 0\)"),
        (without("node_sum", 2), r"rank .: parameter 1: .* lacks the gradients of .rank, batch. .\(1, 0\), \(3, 0\)"),
        (without("node_sum", 2, of_rank=1), "node_sum 2 of rank 0 is missing|node_sum 2 on rank 0, and node_sum 3"),
        (twice("allreduce", 2), "gradient counts 2 times"),
        (
            changed("node_copy", 2, group=RankGroup((0, 1), 1)),
            "rank 0: node_copy 2 .*node_sum 3 .*share communicator 1",
        ),
    ],
)
def test_a_broken_phase_is_refused(change: Change, message: str) -> None:
    with pytest.raises(StepError, match=message):
        verify(Broken(overlap="phases", change=change), on_nodes(2, 2), [Step(0)])


def test_a_sum_of_stale_gradients_is_refused() -> None:
    layout, versions = even_layout(2, 1), Versions()
    states = [SymbolicState(rank, layout, versions) for rank in range(2)]
    first = states[0].weights[0][1]
    for batch, made_with in ((0, first), (1, first)):  # the second with weights that the first has replaced
        total = Counter({Contribution(rank, batch, made_with): 1 for rank in range(2)})
        for state in states:
            state.weights[0][1] = state.update(0, 1, total)
    with pytest.raises(StepError, match=r"gradient of batch 1 is stale: it was made with other weights"):
        check_guarantees([BSP().guarantee(Step(step)) for step in range(2)], states)


def test_a_deadlock_is_refused() -> None:
    @dataclass(frozen=True)
    class Two(Broken):
        def threads(self) -> dict[str, int]:
            return {**super().threads(), COMMUNICATION: 2}

    with pytest.raises(StepError, match=r"deadlock: .*rank 0 in allreduce 2"):
        verify(Two(change=circle), even_layout(3, 4), [Step(0)])


def test_a_rule_may_define_its_own_sends_and_receives() -> None:
    """A server sums what workers send, whichever comes first: `receive_any`, and what it answers."""
    sums: list[int] = []
    send = Operation("send", None, lambda ranks, _: sums.append(ranks[0].rank), op.BARRIER.price, Role.SEND)
    receive = Operation("receive", None, lambda *_: None, op.BARRIER.price, Role.RECEIVE)
    group = RankGroup((0, 1, 2))

    @dataclass(frozen=True)
    class Server(BSP):
        def __call__(self, _: Step, rank: int, __: Layout) -> StepProgram:
            if rank:
                return (Task(send, rank, COMMUNICATION, (), (order(0),), group, peer=0),)
            return tuple(Task(receive, 0, COMMUNICATION, (), (order(0),), group) for _ in range(2))

        def guarantee(self, event: Step):
            return super().guarantee(event)._replace(applied=None)

    for seed in range(8):
        verify(Server(), even_layout(3, 1), [Step(0)], seed)
    assert {tuple(sums[n : n + 2]) for n in range(0, len(sums), 2)} == {(1, 2), (2, 1)}
