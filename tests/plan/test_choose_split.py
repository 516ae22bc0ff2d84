"""The chosen splits are never predicted slower than data parallelism, and are about the best of all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plan.test_split import FAST, SLOW, Timed, cd_dnn, inputs, linear, vgg_a

from unisono.plan.choose_split import LEAST_GAIN, choose_splits, describe_split
from unisono.plan.split import LayerFacts, SplitInputs, predict_splits
from unisono.step.costs import Cost

networks = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 60), st.booleans(), st.sampled_from([0.0, 1e-4])),
    min_size=1,
    max_size=4,
)


def network(widths: list[tuple[int, int, bool, float]], samples: int) -> list[Timed]:
    found = list[Timed]()
    for at, (ifm, ofm, pair, rest) in enumerate(widths):
        partner = f"{at + 1}" if pair and at + 1 < len(widths) else ""
        found += [linear(f"{at}", 16 * ifm, 16 * ofm, samples, partner), (LayerFacts(f"rest {at}"), rest)]
    return found


def test_wide_layers_are_split_on_slow_links_alone() -> None:
    assert choose_splits(inputs(cd_dnn(256), 256, SLOW)).splits
    assert not choose_splits(inputs(cd_dnn(256), 256, FAST)).splits


def test_vgg_a_is_split_in_its_wide_layers_and_its_convolutions_stay() -> None:
    chosen = choose_splits(inputs(vgg_a(64), 64, SLOW))
    assert chosen.splits == {"f1": "row 4", "f2": "column 4 gives part", "f3": "row 4 takes part"}


def test_large_minibatches_are_not_split() -> None:
    assert not choose_splits(inputs(cd_dnn(50_000), 50_000, SLOW)).splits


def test_layers_have_sizes_of_their_own() -> None:
    """16 ranks with 4 samples each: few inputs are gathered over all ranks, many over pairs."""
    samples = 64
    few, many = linear("few", 256, 4096, samples, ranks=16), linear("many", 65536, 64, samples, ranks=16)
    chosen = choose_splits(inputs([few, many], samples, SLOW, 16))
    assert set(chosen.splits) == {"few", "many"}
    assert len({words.split()[1] for words in chosen.splits.values()}) <= 2
    best = min(trying_all(inputs([few, many], samples, SLOW, 16)))
    assert chosen.prediction.prediction.step <= 1.01 * best


def test_the_lines_name_the_plan_and_the_parts() -> None:
    found = inputs(cd_dnn(256), 256, SLOW)
    lines = describe_split(choose_splits(found), found)
    assert "3: column 4 gives part, 4: row 4 takes part" in lines[0]
    assert lines[1].count("of that activations") == 2
    assert "data parallelism" in lines[1]
    none = inputs(cd_dnn(256), 256, FAST)
    assert describe_split(choose_splits(none), none)[0] == "layers split by prediction: none, data parallelism"


@settings(deadline=None, max_examples=50)
@given(networks, st.integers(4, 5000), st.floats(0, 1e-3), st.floats(0, 1e-7))
def test_the_choice_is_never_predicted_slower_than_data_parallelism(
    widths: list[tuple[int, int, bool, float]], samples: int, latency: float, per_byte: float
) -> None:
    found = inputs(network(widths, samples), samples, Cost(latency, per_byte))
    chosen = choose_splits(found)
    step, whole = chosen.prediction.prediction.step, chosen.whole.prediction.step
    assert whole == predict_splits(found, {}).prediction.step
    assert step == predict_splits(found, chosen.splits).prediction.step
    assert step * LEAST_GAIN <= whole if chosen.splits else step == whole


@settings(deadline=None, max_examples=50)
@given(networks, st.integers(4, 500), st.sampled_from([SLOW, FAST, Cost(1e-3, 1e-9)]))
def test_a_takers_giver_is_split_with_it(widths: list[tuple[int, int, bool, float]], samples: int, cost: Cost) -> None:
    layers = network(widths, samples)
    partners = {layer.partner: layer.name for layer, _ in layers if layer.partner}
    splits = choose_splits(inputs(layers, samples, cost)).splits
    takers = {name: words.split()[1] for name, words in splits.items() if words.endswith("takes part")}
    givers = {name: words.split()[1] for name, words in splits.items() if words.endswith("gives part")}
    assert {partners[name]: size for name, size in takers.items()} == givers


def trying_all(found: SplitInputs) -> Iterator[float]:
    """Predicted steps of all splits."""
    takers = {layer.partner for layer in found.layers if layer.partner}
    ways = list[list[str | None]]()
    for layer in found.layers:
        own = [f"{how} {size}" for how, sizes in layer.sizes.items() for size in sizes]
        gives = [f"{words} gives part" for words in own if words.startswith("column") and layer.partner]
        takes = [f"{words} takes part" for words in own if words.startswith("row") and layer.name in takers]
        ways.append([None, *own, *gives, *takes])
    for taken in product(*ways):
        splits = {layer.name: way for layer, way in zip(found.layers, taken, strict=True) if way is not None}
        given_to = {
            (layer.partner, splits[layer.name].split()[1])
            for layer in found.layers
            if splits.get(layer.name, "").endswith("gives part")
        }
        if given_to == {(name, way.split()[1]) for name, way in splits.items() if way.endswith("takes part")}:
            yield predict_splits(found, splits).prediction.step


@pytest.mark.parametrize("cost", [SLOW, FAST, Cost(1e-3, 1e-9)])
@pytest.mark.parametrize("layers", [vgg_a(64)[-3:], cd_dnn(256)[-3:], [(LayerFacts("rest"), 1e-2), *cd_dnn(64)[-2:]]])
def test_the_search_finds_what_trying_all_finds(layers: Sequence[Timed], cost: Cost) -> None:
    found = inputs(layers, 64, cost)
    best, chosen = min(trying_all(found)), choose_splits(found)
    whole = chosen.whole.prediction.step
    wanted = best if best * LEAST_GAIN <= whole else whole
    assert chosen.prediction.prediction.step <= 1.02 * wanted
