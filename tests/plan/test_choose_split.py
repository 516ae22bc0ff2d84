"""The chosen splits are never predicted slower than data parallelism, and are about the best of all."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.plan.test_split import FAST, SLOW, cd_dnn, inputs, linear, vgg_a

from unisono.plan.choose import TIE_RATIO
from unisono.plan.choose_split import LEAST_GAIN, best_of_size, best_weighed, describe_split, rank_splits
from unisono.plan.split import PAIR, LayerFacts, SplitCandidate, SplitInputs, SplitPrediction, candidate, layer_seconds
from unisono.step.costs import Cost

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


def test_wide_layers_are_split_on_slow_links_alone() -> None:
    assert rank_splits(inputs(cd_dnn(256), 256, SLOW))[0].size == 4
    assert rank_splits(inputs(cd_dnn(256), 256, FAST))[0].size == 1


def test_vgg_a_is_split_in_its_wide_layers_alone_and_as_a_whole_not_at_all() -> None:
    assert rank_splits(inputs(vgg_a(64)[-3:], 64, SLOW))[0].size > 1
    assert rank_splits(inputs(vgg_a(64), 64, SLOW))[0].size == 1


def test_large_minibatches_are_not_split() -> None:
    assert rank_splits(inputs(cd_dnn(50_000), 50_000, SLOW))[0].size == 1


def test_within_a_hundredth_nothing_is_split() -> None:
    layers = (LayerFacts("one", 1.0, 100, 1, 1, True, {"column": (2,)}),)
    assert rank_splits(inputs(layers, 8, Cost(0.0, 0.0), ranks=2))[0].size == 1


def test_the_lines_name_the_plan_the_parts_and_the_criterion() -> None:
    found = inputs(cd_dnn(256), 256, SLOW)
    lines = describe_split(rank_splits(found), found)
    assert "4: column 4 gives part, 5: row 4 takes part" in lines[0]
    assert "in groups of 4" in lines[1]
    assert "data parallelism" in lines[1]
    assert "256 samples" in lines[2]
    assert lines[2].endswith("prefers groups for: " + ", ".join(f"{at} (G = 1)" for at in range(7)))
    none = inputs(cd_dnn(256), 256, FAST)
    assert describe_split(rank_splits(none), none)[0] == "layers split by prediction: none, data parallelism"


@given(networks, st.integers(4, 5000), st.floats(0, 1e-3), st.floats(0, 1e-7))
def test_the_choice_is_never_predicted_slower_than_data_parallelism(
    widths: list[tuple[int, int, bool, float]], samples: int, latency: float, per_byte: float
) -> None:
    found = inputs(network(widths, samples), samples, Cost(latency, per_byte))
    ranked = rank_splits(found)
    data = next(one for one in ranked if one.size == 1)
    assert ranked[0].prediction.step <= data.prediction.step
    assert ranked[0].size == 1 or ranked[0].prediction.step * LEAST_GAIN < data.prediction.step
    assert ranked[0].size > 1 or all(
        one.prediction.step * LEAST_GAIN * TIE_RATIO >= data.prediction.step for one in ranked
    )
    assert data.prediction == candidate(found, 1, {}).prediction


@given(networks, st.integers(4, 500), st.sampled_from([SLOW, FAST, Cost(1e-3, 1e-9)]))
def test_a_takers_giver_is_split_with_it(widths: list[tuple[int, int, bool, float]], samples: int, cost: Cost) -> None:
    layers = network(widths, samples)
    partners = {layer.partner: layer.name for layer in layers if layer.partner}
    for one in rank_splits(inputs(layers, samples, cost)):
        takers = {name for name, words in one.splits.items() if words == PAIR[1]}
        givers = {name for name, words in one.splits.items() if words == PAIR[0]}
        assert {partners[name] for name in takers} == givers


def trying_all(found: SplitInputs, size: int) -> list[SplitCandidate]:
    """All splits in groups of `size`."""
    takers = {layer.partner for layer in found.layers if layer.partner}
    ways = [
        (None, *layer.sizes, *(PAIR[:1] if layer.partner else ()), *(PAIR[1:] if layer.name in takers else ()))
        for layer in found.layers
    ]
    every = list[SplitCandidate]()
    for taken in product(*ways):
        splits = {layer.name: way for layer, way in zip(found.layers, taken, strict=True) if way is not None}
        given_to = {layer.partner for layer in found.layers if splits.get(layer.name) == PAIR[0]}
        split = [layer for layer in found.layers if layer.name in splits]
        able = all(size in layer.sizes.get(splits[layer.name].split()[0], ()) for layer in split)
        if able and given_to == {name for name, way in splits.items() if way == PAIR[1]}:
            every.append(candidate(found, size, splits))
    return every


@given(networks, st.integers(4, 500), st.sampled_from([SLOW, FAST]), st.sampled_from([0, 0.3, 1]), st.integers(0, 8))
def test_weighed_sums_have_their_best_splits(
    widths: list[tuple[int, int, bool, float]], samples: int, cost: Cost, weight: float, position: int
) -> None:
    found = inputs(network(widths, samples), samples, cost, ranks=2)

    def total(splits: Mapping[str, str]) -> float:
        parts = [layer_seconds(found, layer, splits.get(layer.name), 2) for layer in found.layers]
        return sum(
            (1 - weight * (number < position)) * one.computing
            + weight * (number <= position) * one.gradients
            + one.activations
            for number, one in enumerate(parts)
        )

    best = min(total(one.splits) for one in trying_all(found, 2))
    assert total(best_weighed(found, 2, position, weight)) == pytest.approx(best, rel=1e-9)


def test_the_seconds_of_a_split_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[tuple[str, str | None]]()

    def counted(found: SplitInputs, layer: LayerFacts, words: str | None, size: int) -> SplitPrediction:
        asked.append((layer.name, words))
        return layer_seconds(found, layer, words, size)

    monkeypatch.setattr("unisono.plan.choose_split.layer_seconds", counted)
    best_of_size(inputs(vgg_a(64), 64, SLOW), 2)
    assert len(asked) == len(set(asked)) > 0


@pytest.mark.parametrize("cost", [SLOW, FAST, Cost(1e-3, 1e-9)])
@pytest.mark.parametrize("layers", [vgg_a(64)[-3:], cd_dnn(256)[-4:], (LayerFacts("rest", 1e-2), *cd_dnn(64)[-3:])])
def test_the_search_finds_what_trying_all_finds(layers: tuple[LayerFacts, ...], cost: Cost) -> None:
    found = inputs(layers, 64, cost)
    for size in (2, 4):
        best = min(one.prediction.step for one in trying_all(found, size))
        assert best_of_size(found, size).prediction.step <= TIE_RATIO * best
