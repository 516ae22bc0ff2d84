"""The chosen splits are never predicted slower than data parallelism, and the prediction is what the layers send."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.plan.choose import TIE_RATIO
from unisono.plan.model_parallel import LayerShape
from unisono.plan.split import (
    PAIR,
    LayerFacts,
    SplitInputs,
    activations_of,
    candidate,
    describe_split,
    options_of,
    rank_splits,
)
from unisono.step.costs import Cost

SLOW, FAST = Cost(1e-4, 1e-8), Cost(1e-6, 1e-11)
"""100 MB/s, and 100 GB/s."""

RATE = 1e11
"""FLOP/s of a rank."""


def linear(name: str, ifm: int, ofm: int, samples: int, partner: str = "", ranks: int = 4) -> LayerFacts:
    """A layer on a rank's share of `samples` samples."""
    sizes = tuple(size for size in (2, 4, 8, 16) if ranks % size == 0 and not ifm % size and not ofm % size)
    seconds = 6 * ifm * ofm * samples / ranks / RATE
    both = {"column": sizes, "row": sizes}
    return LayerFacts(name, seconds, 4 * ifm * ofm, 4 * ifm, 4 * ofm, True, both, partner, LayerShape(ifm, ofm))


def conv(name: str, ifm: int, ofm: int, side: int, samples: int, ranks: int = 4) -> LayerFacts:
    """A convolution of 3 x 3 on images of `side` x `side`."""
    weights, area = 4 * 9 * ifm * ofm, side * side
    seconds = 6 * 9 * ifm * ofm * area * samples / ranks / RATE
    shape = LayerShape(ifm, ofm, 9, area)
    return LayerFacts(name, seconds, weights, 4 * ifm * area, 4 * ofm * area, True, {"column": (2, 4)}, "", shape)


def cd_dnn(samples: int) -> tuple[LayerFacts, ...]:
    widths = [440, *[2048] * 7, 10]
    return tuple(
        linear(f"{at}", *widths[at : at + 2], samples, f"{at + 1}" if at < 7 else "")._replace(backward=at > 0)
        for at in range(8)
    )


def vgg_a(samples: int) -> tuple[LayerFacts, ...]:
    widths = ((3, 64, 224), (64, 128, 112), (128, 256, 56), (256, 256, 56), (256, 512, 28), (512, 512, 28))
    convolutions = [conv(f"c{at}", *one, samples) for at, one in enumerate((*widths, (512, 512, 14), (512, 512, 14)))]
    return (
        convolutions[0]._replace(backward=False),
        *convolutions[1:],
        linear("f1", 512 * 49, 4096, samples, "f2"),
        linear("f2", 4096, 4096, samples, "f3"),
        linear("f3", 4096, 1000, samples),
    )


def inputs(layers: tuple[LayerFacts, ...], samples: int, cost: Cost, ranks: int = 4) -> SplitInputs:
    return SplitInputs(layers, ranks, samples, cost)


def test_the_worked_example() -> None:
    layers = linear("up", 1024, 4096, 128, "down"), linear("down", 4096, 1024, 128)
    found = inputs(layers, 128, SLOW)
    pair = dict(zip(("up", "down"), PAIR, strict=True))
    sent = [candidate(found, size, pair if size > 1 else {}).prediction for size in (1, 2, 4)]
    assert [one.gradient_bytes / 1e6 for one in sent] == [pytest.approx(n, abs=0.05) for n in (50.3, 16.8, 0)]
    assert [one.activation_bytes / 1e6 for one in sent] == [pytest.approx(n, abs=0.05) for n in (0, 0.5, 1.6)]
    assert rank_splits(found)[0].words == {"up": "column 4 gives part", "down": "row 4 takes part"}


@pytest.mark.parametrize(
    ("words", "backward", "calls", "sent"),
    [
        ("column", True, 2, 3 / 4 * (40 + 2 * 12)),
        ("column", False, 1, 3 / 4 * 40),
        ("row", True, 2, 3 / 4 * (2 * 40 + 12)),
        (PAIR[0], True, 1, 3 / 4 * 2 * 12),
        (PAIR[0], False, 0, 0),
        (PAIR[1], True, 1, 3 / 4 * 2 * 40),
    ],
)
def test_activations_are_sent_as_the_table_says(words: str, backward: bool, calls: int, sent: float) -> None:
    layer = LayerFacts("layer", 1.0, 0, inputs=3, outputs=10, backward=backward)
    assert activations_of(layer, words, 4, samples=4) == (calls, sent)


def test_wide_layers_are_split_on_slow_links_alone() -> None:
    assert rank_splits(inputs(cd_dnn(256), 256, SLOW))[0].size == 4
    assert rank_splits(inputs(cd_dnn(256), 256, FAST))[0].size == 1


def test_what_is_not_split_is_computed_by_the_whole_group() -> None:
    """So the wide layers of VGG-A are split alone, and not with its convolutions."""
    wide = vgg_a(64)[-3:]
    assert rank_splits(inputs(wide, 64, SLOW))[0].size > 1
    assert rank_splits(inputs(vgg_a(64), 64, SLOW))[0].size == 1
    rest = LayerFacts("rest", 1.0)
    found = inputs((rest, *wide), 64, SLOW)
    split = candidate(found, 4, rank_splits(inputs(wide, 64, SLOW))[0].splits).prediction
    assert split.computing == pytest.approx(4 * 1.0 + sum(layer.seconds for layer in wide))


def test_large_minibatches_are_not_split() -> None:
    assert rank_splits(inputs(cd_dnn(50_000), 50_000, SLOW))[0].size == 1


def test_gradients_hide_behind_computing_and_activations_do_not() -> None:
    layers = linear("up", 64, 64, 64), LayerFacts("rest", 1.0)
    hidden = candidate(inputs(layers, 64, SLOW), 1, {}).prediction
    assert hidden.gradient_bytes > 0
    assert hidden.gradients == pytest.approx(0.0, abs=1e-3)
    turned = candidate(inputs(layers[::-1], 64, SLOW), 1, {}).prediction
    assert turned.gradients == 0.0
    split = candidate(inputs(layers, 64, SLOW), 2, {"up": "column"}).prediction
    assert split.activations == pytest.approx(2 * SLOW.latency + split.activation_bytes * SLOW.per_byte)


def test_within_a_hundredth_nothing_is_split() -> None:
    layers = (LayerFacts("one", 1.0, 100, 1, 1, True, {"column": (2,)}),)
    assert rank_splits(inputs(layers, 8, Cost(0.0, 0.0), ranks=2))[0].size == 1


def test_the_lines_name_the_plan_the_parts_and_the_criterion() -> None:
    found = inputs(cd_dnn(256), 256, SLOW)
    lines = describe_split(rank_splits(found), found)
    assert "3: column 4 gives part, 4: row 4 takes part" in lines[0]
    assert "in groups of 4" in lines[1]
    assert "data parallelism" in lines[1]
    assert "256 samples" in lines[2]
    assert "1 (1 of 4 ranks)" in lines[2]
    none = inputs(cd_dnn(256), 256, FAST)
    assert describe_split(rank_splits(none), none)[0] == "layers split by prediction: none, data parallelism"


networks = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 60), st.booleans(), st.sampled_from([0.0, 1e-4])),
    min_size=1,
    max_size=4,
)


def network(widths: list[tuple[int, int, bool, float]], samples: int) -> tuple[LayerFacts, ...]:
    found = list[LayerFacts]()
    for at, (ifm, ofm, pair, rest) in enumerate(widths):
        partner = f"{at + 1}" if pair and at + 1 < len(widths) else ""
        found += [linear(f"{at}", 16 * ifm, 16 * ofm, samples, partner), LayerFacts(f"rest {at}", rest)]
    return tuple(found)


@given(networks, st.integers(4, 5000), st.floats(0, 1e-3), st.floats(0, 1e-7))
def test_the_choice_is_never_predicted_slower_than_data_parallelism(
    widths: list[tuple[int, int, bool, float]], samples: int, latency: float, per_byte: float
) -> None:
    found = inputs(network(widths, samples), samples, Cost(latency, per_byte))
    ranked = rank_splits(found)
    data = next(one for one in ranked if one.size == 1)
    assert ranked[0].prediction.step <= data.prediction.step
    assert ranked[0].size == 1 or ranked[0].prediction.step * TIE_RATIO < data.prediction.step
    assert data.prediction == candidate(found, 1, {}).prediction


@given(networks, st.integers(4, 500), st.sampled_from([SLOW, FAST, Cost(1e-3, 1e-9)]))
def test_a_takers_giver_is_split_with_it(widths: list[tuple[int, int, bool, float]], samples: int, cost: Cost) -> None:
    layers = network(widths, samples)
    partners = {layer.partner: layer.name for layer in layers if layer.partner}
    for one in rank_splits(inputs(layers, samples, cost)):
        takers = {name for name, words in one.splits.items() if words == PAIR[1]}
        givers = {name for name, words in one.splits.items() if words == PAIR[0]}
        assert {partners[name] for name in takers} == givers


@given(networks, st.integers(4, 500), st.sampled_from([SLOW, Cost(1e-3, 1e-9)]))
def test_the_search_is_about_as_good_as_trying_all(
    widths: list[tuple[int, int, bool, float]], samples: int, cost: Cost
) -> None:
    found = inputs(network(widths, samples), samples, cost)
    steps = [one.prediction.step for one in rank_splits(found)]
    everything = [candidate(found, 1, {})]
    for size in (2, 4):
        options = options_of(found.layers, size)
        for taken in product((False, True), repeat=len(options)):
            some = [option for option, take in zip(options, taken, strict=True) if take]
            names = [name for option in some for name in option]
            if len(names) == len(set(names)):
                everything.append(candidate(found, size, {name: one[name] for one in some for name in one}))
    assert steps[0] <= 1.05 * min(one.prediction.step for one in everything)
