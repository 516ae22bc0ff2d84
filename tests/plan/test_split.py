"""The prediction has what the layers send, what the whole group computes, and what hides behind computing."""

from __future__ import annotations

import pytest

from unisono.plan.model_parallel import LayerShape
from unisono.plan.split import (
    PAIR,
    LayerFacts,
    SplitInputs,
    activations_of,
    candidate,
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
    assert candidate(found, 4, pair).words == {"up": "column 4 gives part", "down": "row 4 takes part"}


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


def test_what_is_not_split_is_computed_by_the_whole_group() -> None:
    wide = vgg_a(64)[-3:]
    found = inputs((LayerFacts("rest", 1.0), *wide), 64, SLOW)
    split = candidate(found, 4, {layer.name: "column" for layer in wide}).prediction
    assert split.computing == pytest.approx(4 * 1.0 + sum(layer.seconds for layer in wide))


def test_gradients_hide_behind_computing_and_activations_do_not() -> None:
    layers = linear("up", 64, 64, 64), LayerFacts("rest", 1.0)
    hidden = candidate(inputs(layers, 64, SLOW), 1, {}).prediction
    assert hidden.gradient_bytes > 0
    assert hidden.gradients == pytest.approx(0.0, abs=1e-3)
    turned = candidate(inputs(layers[::-1], 64, SLOW), 1, {}).prediction
    assert turned.gradients == 0.0
    split = candidate(inputs(layers, 64, SLOW), 2, {"up": "column"}).prediction
    assert split.activations == pytest.approx(2 * SLOW.latency + split.activation_bytes * SLOW.per_byte)


def test_gradients_hide_behind_the_backward_pass_alone_where_it_waits_for_them() -> None:
    layers = LayerFacts("first", 3.0), LayerFacts("last", 3.0, weights=100)
    found = inputs(layers, 64, Cost(0.0, 6.0 / 150))  # 6 s of gradients
    assert candidate(found, 1, {}).prediction.gradients == pytest.approx(6 - 3 - 1)
    assert candidate(found._replace(deferred=False), 1, {}).prediction.gradients == pytest.approx(6 - 2 - 2 / 3)
