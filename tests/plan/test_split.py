"""The prediction has the exchanges of split layers as tasks of the step, with the costs of their groups.

The chosen splits are never predicted slower than data parallelism, and are about the best of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.placement import Placement, one_rank_per_node, regular
from unisono.plan.choose import chosen_setting
from unisono.plan.layer_plan import COLUMN, PART, ROW, Split, make_plan
from unisono.plan.split import (
    LEAST_GAIN,
    GroupLinks,
    LayerFacts,
    LinkCosts,
    SplitInputs,
    allreduce_cost,
    choose_splits,
    describe_borders,
    predict_splits,
    sent_of,
    with_splits,
)
from unisono.rules import BSP
from unisono.step import operations as op
from unisono.step.costs import Cost
from unisono.step.program import Step
from unisono.step.verify import verify
from unisono.tensor_parallel.choose_plan import inputs_of

SLOW, FAST = Cost(1e-4, 1e-8), Cost(1e-6, 1e-11)
"""100 MB/s, and 100 GB/s."""

RATE = 1e11
"""FLOP/s of a rank."""

Timed = tuple[LayerFacts, float]
"""Layer, and the seconds of its forward pass on a rank."""

PAIR = "column 2 gives part", "row 2 takes part"


def splits_of(texts: dict[str, str]) -> dict[str, Split]:
    return make_plan(texts).splits


def layer_of(
    name: str, weights: int = 0, inputs: int = 0, outputs: int = 0, backward: bool = True, **more: Any
) -> LayerFacts:
    """A layer that was traced for one sample."""
    nbytes = {"parameter_bytes": weights, "gradient_bytes": weights, "input_bytes": inputs, "activation_bytes": outputs}
    return LayerFacts(name, more.pop("kind", "Linear"), **nbytes, input_requires_grad=backward, **more)


def linear(name: str, ifm: int, ofm: int, samples: int, partner: str = "", ranks: int = 4) -> Timed:
    """A layer on a rank's share of `samples` samples."""
    sizes = tuple(size for size in (2, 4, 8, 16) if ranks % size == 0 and not ifm % size and not ofm % size)
    both = tuple(Split(how, size) for how in (COLUMN, ROW) for size in sizes)
    facts = layer_of(name, 4 * ifm * ofm, 4 * ifm, 4 * ofm, splits=both, partner=partner)
    return facts, 2 * ifm * ofm * samples / ranks / RATE


def conv(name: str, ifm: int, ofm: int, side: int, samples: int, ranks: int = 4) -> Timed:
    """A convolution of 3 x 3 on images of `side` x `side`."""
    area, splits = side * side, (Split(COLUMN, 2), Split(COLUMN, 4))
    facts = layer_of(name, 36 * ifm * ofm, 4 * ifm * area, 4 * ofm * area, ifm > 3, splits=splits)
    return facts, 18 * ifm * ofm * area * samples / ranks / RATE


def cd_dnn(samples: int) -> list[Timed]:
    widths = [440, *[2048] * 7, 10]
    layers = [linear(f"{at}", *widths[at : at + 2], samples, f"{at + 1}" if at < 7 else "") for at in range(8)]
    return [(replace(layers[0][0], input_requires_grad=False), layers[0][1]), *layers[1:]]


def vgg_a(samples: int) -> list[Timed]:
    widths = ((3, 64, 224), (64, 128, 112), (128, 256, 56), (256, 256, 56), (256, 512, 28), (512, 512, 28))
    return [
        *(conv(f"c{at}", *shape, samples) for at, shape in enumerate((*widths, (512, 512, 14), (512, 512, 14)))),
        linear("f1", 512 * 49, 4096, samples, "f2"),
        linear("f2", 4096, 4096, samples, "f3"),
        linear("f3", 4096, 1000, samples),
    ]


def inputs(
    layers: Sequence[Timed], samples: int, cost: Cost, ranks: int = 4, placement: Placement | None = None
) -> SplitInputs:
    facts = list[LayerFacts]()
    for layer, took in layers:
        twice = 2 if layer.gradient_bytes and layer.input_requires_grad else 1
        facts.append(replace(layer, forward_seconds=took, backward_seconds=twice * took))
    costs = LinkCosts(cost, cost._replace(latency=cost.latency / 2))
    return inputs_of(tuple(facts), samples / ranks, GroupLinks(placement or one_rank_per_node(ranks), costs, costs))


def sent(case: SplitInputs, splits: dict[str, str]) -> tuple[float, float]:
    """Bytes of gradients and of activations."""
    plan = splits_of(splits)
    activations = sum(task.nbytes for task in with_splits(case, plan).costs.layout.activations)
    return sum(sent_of(case, layer, plan.get(layer.name)).nbytes for layer in case.layers) - activations, activations


def test_the_worked_example() -> None:
    case = inputs([linear("up", 1024, 4096, 128, "down"), linear("down", 4096, 1024, 128)], 128, SLOW)
    pair = dict(zip(("up", "down"), PAIR, strict=True))
    assert sent(case, {}) == pytest.approx((50.3e6, 0), rel=1e-3)
    assert sent(case, pair) == pytest.approx((16.8e6, 4 * 0.131e6), rel=2e-3)


@pytest.mark.parametrize(
    ("text", "facts", "forward", "backward"),
    [
        ("column 4", {}, [3 * 6, 3 * 20 / 4], [3 * 20 / 4, 3 * 6]),
        ("column 4", {"backward": False}, [3 * 6, 3 * 20 / 4], [3 * 20 / 4]),
        ("column 4 gives part", {}, [3 * 6], [3 * 6]),
        ("column 4 takes part", {}, [3 * 6, 3 * 20 / 4], [3 * 20 / 4, 3 * 6]),
        ("row 4", {}, [3 * 6 / 4, 3 * 20], [3 * 20, 3 * 6 / 4]),
        ("row 4 takes part", {}, [3 * 20], [3 * 20]),
        ("row 4 gives part", {"backward": False}, [3 * 6 / 4, 3 * 20], [3 * 20]),
        ("row 4", {"backward": False, "kind": "Embedding"}, [3 * 6, 3 * 20], [3 * 20]),  # an embedding
        ("row 1", {}, [], []),
    ],
)
def test_activations_are_sent_as_the_table_says(
    text: str, facts: dict[str, Any], forward: list[float], backward: list[float]
) -> None:
    """2 samples a rank, of 3 bytes in and 10 bytes out."""
    layer = layer_of("layer", 8, inputs=3, outputs=10, **facts)
    split = with_splits(inputs([(layer, 1.0)], 8, SLOW), splits_of({"layer": text}))
    tasks = split.costs.layout.activations
    assert [task.nbytes for task in tasks if not task.backward] == forward
    assert [task.nbytes for task in tasks if task.backward] == backward


def test_computing_takes_as_long_and_waits_for_activations() -> None:
    layers = [(layer_of("rest"), 1.0), linear("up", 64, 64, 64)]
    case = inputs(layers, 64, SLOW)
    unsplit, split = (predict_splits(case, splits).prediction for splits in ({}, {"up": Split(COLUMN, 4)}))
    assert unsplit.step - unsplit.waiting == pytest.approx(split.step - split.waiting)
    assert split.waiting == pytest.approx(sent_of(case, case.layers[1], Split(COLUMN, 4)).activations)
    assert sent_of(case, case.layers[1], Split(COLUMN, 4)).gradients == 0  # no other rank has the part


def test_the_time_of_weights_is_that_of_a_part() -> None:
    """Of 3 s and 5 s that two layers take, 2 s and 4 s are those of their weights: half of that in groups of 2."""
    layers = [linear("a", 64, 64, 64), linear("b", 64, 64, 64)]
    timed = [
        replace(layer, forward_seconds=3.0, backward_seconds=5.0, forward_of_weights=2.0, backward_of_weights=4.0)
        for layer, _ in layers
    ]
    costs = LinkCosts(SLOW, SLOW)
    case = inputs_of(tuple(timed), 16, GroupLinks(one_rank_per_node(4), costs, costs))
    unsplit, half, both = (
        with_splits(case, {name: Split(COLUMN, 2) for name in names}).costs.computing
        for names in ([], ["b"], ["a", "b"])
    )
    assert (unsplit.needed, unsplit.ready, unsplit.whole) == ((0, 3), (16, 11), 16)
    assert (half.needed, half.ready, half.whole) == ((0, 3), (13, 8), 13)
    assert (both.needed, both.ready, both.whole) == ((0, 2), (10, 7), 10)


def test_layers_are_split_for_the_time_of_their_weights_alone() -> None:
    """Exchanges take longer than gradients, which hide: 64 samples of 16 KiB beside 16 KiB of weights."""
    layer, _ = linear("a", 1, 4096, 64)
    layer = replace(layer, forward_seconds=3.0, backward_seconds=5.0)
    costs = LinkCosts(SLOW, SLOW)
    for fixed, split in ((0.0, False), (2.0, True)):
        timed = replace(layer, splits=(Split(ROW, 2),), forward_of_weights=fixed, backward_of_weights=fixed)
        case = inputs_of((timed,), 16, GroupLinks(one_rank_per_node(4), costs, costs))
        sent, unsplit = (sent_of(case, timed, each) for each in (Split(ROW, 2), None))
        assert sent.activations > 8 * unsplit.gradients  # the largest of WEIGHTS
        assert bool(choose_splits(case).splits) == split


def test_what_runs_at_once_is_slower_where_ranks_share_cores() -> None:
    case = inputs(vgg_a(64), 64, SLOW)
    costs = case.step.costs
    slower_cores = replace(costs, computing=replace(costs.computing, beside=0.5))
    shared = replace(case, step=case.step._replace(costs=slower_cores))
    for splits in ({}, splits_of({"f1": "column 4 gives part", "f2": "row 4 takes part"})):
        alone, slower = (predict_splits(variant, splits).prediction.step for variant in (case, shared))
        assert alone * 1.01 < slower < alone * 2


def test_a_loop_of_ones_own_updates_its_parts_behind_all_exchanges() -> None:
    """Nothing hides the update, and a rank updates half of what is split in two."""
    case = inputs([linear("up", 64, 64, 64)], 64, SLOW)
    costs = case.step.costs
    updating = replace(costs, computing=replace(costs.computing, update=1e-6))
    later = replace(case, step=case.step._replace(costs=updating))
    for splits, parts in (({}, 1), ({"up": Split(COLUMN, 2)}, 2)):
        alone, longer = (predict_splits(variant, splits).prediction for variant in (case, later))
        assert longer.step - alone.step == pytest.approx(
            1e-6 * sum(case.weights.values()) / parts, rel=0.01
        )  # and its flags
        assert longer.waiting == pytest.approx(alone.waiting)


def test_layers_without_weights_of_their_own_are_predicted() -> None:
    """A tied layer's weight is another's, and a frozen one's is not trained."""
    tied = replace(linear("head", 64, 64, 64)[0], gradient_bytes=0), 1.0
    case = inputs([linear("words", 64, 64, 64), tied], 64, SLOW)
    assert [*case.weights] == ["words"]
    both = {"words": Split(COLUMN, 2), "head": Split(ROW, 2)}
    assert predict_splits(case, both).prediction.step > predict_splits(case, {"words": both["words"]}).prediction.step


def test_borders_are_where_samples_change_hands() -> None:
    pair = {"fc1": Split(COLUMN, 4, gives=PART), "fc2": Split(ROW, 4, takes=PART)}
    assert describe_borders(pair) == "samples of 4 ranks: gathered before fc1, scattered after fc2"


def test_several_sizes_in_one_step_are_verified_and_played() -> None:
    case = inputs(vgg_a(64)[-3:], 64, SLOW)
    splits = {"f1": "column 4 gives part", "f2": "row 4 takes part", "f3": "column 2"}
    best = predict_splits(case, splits_of(splits))
    layout = best.costs.layout
    assert {bucket.groups for bucket in layout.buckets} == {((0,), (1,), (2,), (3,)), ((0, 2), (1, 3))}
    for overlap in ("chain", "none"):
        verify(BSP(overlap=overlap), layout, [Step(0), Step(1)])
    program = best.rule(Step(0), 1, layout)
    groups = [task.group.ranks for task in program if task.operation is op.ACTIVATIONS and task.group]
    assert groups == [(0, 1, 2, 3)] * 2 + [(0, 1)] * 4 + [(0, 1, 2, 3)] * 2


def links(placement: Placement) -> GroupLinks:
    return GroupLinks(placement, *(LinkCosts(cost, cost) for cost in (Cost(0.0, 1.0), Cost(0.0, 0.01))))


def test_groups_within_a_node_have_its_cost_and_those_across_share_its_link() -> None:
    """Two nodes of 2 ranks."""
    placement, layer = regular(1, 2, 2), layer_of("layer", 8, inputs=3, outputs=10)
    case = replace(inputs([(layer, 1.0)], 8, SLOW, placement=placement), links=links(placement))
    within, across = (with_splits(case, {"layer": Split(COLUMN, size)}).costs.activations for size in (2, 4))
    assert [(priced.seconds, priced.link) for priced in within] == [
        (pytest.approx(0.01 * n), 0) for n in (6, 10, 10, 6)
    ]
    all_to_all = 2 * 3 * 20 / 4  # each rank of a node sends its own
    assert [priced.seconds for priced in across] == [3 * 6, all_to_all, all_to_all, 3 * 6]
    assert allreduce_cost(links(placement), 2) == Cost(0.0, 2 * 1.0)  # 2 parts on each node
    assert allreduce_cost(links(placement), 4) == Cost(0.0, 0.0)


def blocks_sent(size: int, how: str) -> tuple[int, int]:
    """Blocks of x and y that rank 0 of a group sends, from the (samples, features) that ranks have and need."""
    own, part = (
        ({(rank, feature) for feature in range(size)} for rank in (0, 1)),
        {(sample, 1) for sample in range(size)},
    )
    mine, theirs = own
    if how == "column":  # rank 1 needs all of x, and its own samples of y, of which rank 0 has its part
        return len(mine), len(theirs & {(sample, 0) for sample in range(size)})
    return len(mine & part), len(theirs)  # rank 1 needs its part of x, and the sum of its own samples of y


@given(st.sampled_from([2, 4, 8]), st.sampled_from(["column", "row"]))
def test_bytes_are_those_of_the_blocks_that_change_hands(size: int, how: str) -> None:
    layer = layer_of("layer", 8, inputs=size, outputs=100 * size)  # a block is 1 byte of x, 100 of y
    tasks = with_splits(inputs([(layer, 1.0)], 8, SLOW, 8), {"layer": Split(how, size)}).costs.layout.activations
    x, y = blocks_sent(size, how)
    assert [task.nbytes for task in tasks] == [n * (size - 1) for n in (x, 100 * y, 100 * y, x)]


networks = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 60), st.booleans(), st.sampled_from([0.0, 1e-4])),
    min_size=1,
    max_size=4,
)


def network(widths: list[tuple[int, int, bool, float]], samples: int) -> list[Timed]:
    layers = list[Timed]()
    for at, (ifm, ofm, pair, rest) in enumerate(widths):
        partner = f"{at + 1}" if pair and at + 1 < len(widths) else ""
        layers += [linear(f"{at}", 16 * ifm, 16 * ofm, samples, partner), (layer_of(f"rest {at}"), rest)]
    return layers


def test_wide_layers_are_split_on_slow_links_alone() -> None:
    assert choose_splits(inputs(cd_dnn(256), 256, SLOW)).splits
    assert not choose_splits(inputs(cd_dnn(256), 256, FAST)).splits


def test_vgg_a_is_split_in_its_wide_layers_and_its_convolutions_stay() -> None:
    chosen = choose_splits(inputs(vgg_a(64), 64, SLOW))
    assert chosen.splits == splits_of({"f1": "row 4", "f2": "column 4 gives part", "f3": "row 4 takes part"})


def test_large_minibatches_are_not_split() -> None:
    case = inputs(cd_dnn(50_000), 50_000, SLOW)
    assert not choose_splits(case, predict_splits(case, {})).splits


def test_gradients_that_hide_in_other_buckets_are_no_reason_to_split() -> None:
    """One bucket, as a run begins with, is full when all is computed: a split makes that step 1.3 times as fast."""
    case = inputs([(layer_of("conv", 1 << 14), 2e-3), linear("up", 1024, 1024, 64)], 64, Cost(1e-5, 5e-10))
    first, split = (predict_splits(case, splits).prediction.step for splits in ({}, {"up": Split(COLUMN, 4)}))
    assert first > 1.3 * split
    chosen = choose_splits(case)
    assert not chosen.splits
    assert chosen.whole.prediction.step < split


def test_layers_have_sizes_of_their_own() -> None:
    """16 ranks with 4 samples each: few inputs are gathered over all ranks, many over pairs."""
    samples = 64
    few, many = linear("few", 256, 4096, samples, ranks=16), linear("many", 65536, 64, samples, ranks=16)
    chosen = choose_splits(inputs([few, many], samples, SLOW, 16))
    assert set(chosen.splits) == {"few", "many"}
    assert len({split.ranks for split in chosen.splits.values()}) <= 2
    best = min(trying_all(inputs([few, many], samples, SLOW, 16)))
    assert chosen.prediction.prediction.step <= 1.01 * best


def test_the_lines_name_the_plan_and_the_parts() -> None:
    case = inputs(cd_dnn(256), 256, SLOW)
    lines = choose_splits(case).describe(case)
    assert "3: column 4 gives part, 4: row 4 takes part" in lines[0]
    assert lines[1].count("of that activations") == 2
    assert "data parallelism" in lines[1]
    none = inputs(cd_dnn(256), 256, FAST)
    assert choose_splits(none).describe(none)[0] == "layers split by prediction: none, data parallelism"


@given(networks, st.integers(4, 5000), st.floats(0, 1e-3), st.floats(0, 1e-7))
def test_the_choice_is_never_predicted_slower_than_data_parallelism(
    widths: list[tuple[int, int, bool, float]], samples: int, latency: float, per_byte: float
) -> None:
    case = inputs(network(widths, samples), samples, Cost(latency, per_byte))
    chosen = choose_splits(case)
    step, unsplit = chosen.prediction.prediction.step, chosen.whole.prediction.step
    assert unsplit == chosen_setting(case.step).prediction.step
    assert step == chosen_setting(with_splits(case, chosen.splits)).prediction.step
    assert step * LEAST_GAIN <= unsplit if chosen.splits else step == unsplit


@given(networks, st.integers(4, 500), st.sampled_from([SLOW, FAST, Cost(1e-3, 1e-9)]))
def test_a_takers_giver_is_split_with_it(widths: list[tuple[int, int, bool, float]], samples: int, cost: Cost) -> None:
    layers = network(widths, samples)
    partners = {layer.partner: layer.name for layer, _ in layers if layer.partner}
    case = inputs(layers, samples, cost)
    splits = choose_splits(case, predict_splits(case, {})).splits
    takers = {name: split.ranks for name, split in splits.items() if split.takes == PART}
    givers = {name: split.ranks for name, split in splits.items() if split.gives == PART}
    assert {partners[name]: size for name, size in takers.items()} == givers


def trying_all(case: SplitInputs) -> Iterator[float]:
    """Predicted steps of all splits."""
    takers = {layer.partner for layer in case.layers if layer.partner}
    ways = list[list[Split | None]]()
    for layer in case.layers:
        gives = [replace(split, gives=PART) for split in layer.splits if split.how == COLUMN and layer.partner]
        takes = [replace(split, takes=PART) for split in layer.splits if split.how == ROW and layer.name in takers]
        ways.append([None, *layer.splits, *gives, *takes])
    for taken in product(*ways):
        splits = {layer.name: way for layer, way in zip(case.layers, taken, strict=True) if way is not None}
        partners = {layer.name: layer.partner for layer in case.layers}
        given_to = {(partners[name], way.ranks) for name, way in splits.items() if way.gives == PART}
        if given_to == {(name, way.ranks) for name, way in splits.items() if way.takes == PART}:
            yield predict_splits(case, splits).prediction.step


@pytest.mark.parametrize("cost", [SLOW, FAST, Cost(1e-3, 1e-9)])
@pytest.mark.parametrize("layers", [vgg_a(64)[-3:], cd_dnn(256)[-3:], [(layer_of("rest"), 1e-2), *cd_dnn(64)[-2:]]])
def test_the_search_finds_what_trying_all_finds(layers: Sequence[Timed], cost: Cost) -> None:
    case = inputs(layers, 64, cost)
    best, chosen = min(trying_all(case)), choose_splits(case)
    unsplit = chosen.whole.prediction.step
    wanted = best if best * LEAST_GAIN <= unsplit else unsplit
    assert chosen.prediction.prediction.step <= 1.02 * wanted
