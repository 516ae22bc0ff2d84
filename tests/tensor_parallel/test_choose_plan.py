"""Facts of a model's layers for the prediction: bytes, sizes, pairs, and layers that are left whole."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import cast

import pytest
import torch
from torch import nn

from unisono.placement import one_rank_per_node
from unisono.plan.layer_plan import Split
from unisono.plan.split import GroupLinks, LayerFacts, LinkCosts
from unisono.plan.trace import trace_values
from unisono.step.costs import Cost
from unisono.tensor_parallel import choose_plan as chooser
from unisono.tensor_parallel.choose_plan import facts_of, inputs_of, measure_beside, pairs_of
from unisono.world import World

ANY = Cost(0.0, 1.0)
BOTH = *(Split("column", size) for size in (2, 4)), *(Split("row", size) for size in (2, 4))


def facts(model: nn.Module, example: torch.Tensor, ranks: int = 4) -> dict[str, LayerFacts]:
    traced = trace_values(model, (example,), nullcontext())
    layer_facts = facts_of(model, traced.layers, traced.once, ranks)
    return {layer.name: layer for layer in layer_facts}


def test_layers_have_bytes_a_sample_and_sizes() -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 12, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(192, 8), nn.ReLU(), nn.Linear(8, 6)
    )
    layer_facts = facts(model, torch.zeros(5, 2, 4, 4))
    conv, first, last = layer_facts["0"], layer_facts["3"], layer_facts["5"]
    assert (conv.gradient_bytes, conv.input_bytes, conv.activation_bytes) == (4 * 228, 4 * 5 * 32, 4 * 5 * 192)
    assert (conv.splits, conv.input_requires_grad) == (BOTH[:2], False)
    assert first.splits == BOTH
    assert (last.splits, last.partner, first.partner) == ((BOTH[0], *BOTH[2:]), "", "5")
    assert layer_facts["1"].splits == ()
    assert sum(layer.gradient_bytes for layer in layer_facts.values()) == sum(
        parameter.nbytes for parameter in model.parameters()
    )


def test_an_embedding_gathers_its_numbers() -> None:
    layer_facts = facts(nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8)), torch.zeros(3, 7, dtype=torch.int64))
    assert (layer_facts["1"].input_bytes, layer_facts["0"].input_bytes) == (3 * 7 * 8 * 4, 3 * 7 * 8)
    assert (layer_facts["0"].splits, layer_facts["0"].input_requires_grad) == (BOTH[2:], False)
    assert [layer.takes_whole(Split("row", 2)) for layer in layer_facts.values()] == [True, False]


def test_an_attention_has_its_heads_split() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    layer_facts = facts(nn.Sequential(layer), torch.zeros(3, 5, 8))
    heads = layer_facts["0.self_attn"]
    assert heads.splits == (Split("heads", 2),)
    assert (heads.gradient_bytes, heads.input_bytes) == (4 * (4 * 64 + 4 * 8), 4 * 3 * 5 * 8)
    assert heads.takes_whole(heads.splits[0])
    assert layer_facts["0.linear1"].splits == BOTH
    layer.linear1.weight = layer.self_attn.in_proj_weight
    layer.linear1.bias = layer.self_attn.in_proj_bias
    layer.linear2, layer.linear1.out_features = nn.Linear(24, 8), 24
    assert facts(nn.Sequential(layer), torch.zeros(3, 5, 8))["0.self_attn"].splits == ()


def test_tied_repeated_and_computed_weights_stay_whole() -> None:
    tied = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    tied[1].weight = tied[0].weight
    layer_facts = facts(tied, torch.zeros(2, 8))
    assert not any(layer.splits for layer in layer_facts.values())
    assert sum(layer.gradient_bytes for layer in layer_facts.values()) == 4 * (64 + 16)
    again = nn.Linear(8, 8)
    assert not any(layer.splits for layer in facts(nn.Sequential(again, again), torch.zeros(2, 8)).values())
    normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)))
    assert not any(layer.splits for layer in facts(normed, torch.zeros(2, 8)).values())
    assert not any(layer.splits for layer in facts(nn.Linear(8, 8), torch.zeros(2, 8)).values())  # it has no name


def test_a_weight_that_a_function_reads_stays_whole() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.hidden = nn.Embedding(8, 8), nn.Linear(8, 8)

        def forward(self, numbers: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(self.hidden(self.words(numbers)), self.words.weight)

    layer_facts = facts(Tied(), torch.zeros(3, dtype=torch.int64))
    assert layer_facts["words"].splits == ()
    assert layer_facts["hidden"].splits == BOTH


def test_a_layer_that_some_rank_does_not_call_stays_whole_and_counts() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    layers = trace_values(model, (torch.zeros(2, 8),), nullcontext()).layers
    layer_facts = facts_of(model, layers, {"", "0", "2"}, 4)
    assert [layer.name for layer in layer_facts] == ["0", "1", "2"]
    assert [bool(layer.splits) for layer in layer_facts] == [True, False, True]
    assert not any(layer.partner for layer in layer_facts)
    timed = tuple(replace(layer, forward_seconds=1, backward_seconds=2) for layer in layer_facts)
    links = GroupLinks(one_rank_per_node(4), *[LinkCosts(ANY, ANY)] * 2)
    inputs = inputs_of(timed, 2.0, links)
    assert (inputs.step.costs.computing.whole, inputs.scale) == (9, 2)
    assert list(inputs.weights.items()) == [(name, 4 * 72) for name in "012"]


def test_frozen_weights_are_not_exchanged() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    layer_facts = facts(model, torch.zeros(2, 8))
    assert (layer_facts["0"].gradient_bytes, layer_facts["1"].gradient_bytes) == (0, 4 * 72)


class Alone:
    """World of one rank, whose collectives take no time of the test."""

    def allreduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return tensor


def test_the_rate_of_a_step_and_an_allreduce_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone they take 4 and 6 s: 2 s of the longer are left when the shorter ends."""
    now = [0.0]
    monkeypatch.setattr(chooser.time, "perf_counter", lambda: now[0])

    def steps(begin: Callable[[], None], seconds: float) -> list[object]:
        for _ in range(4):
            begin()
            now[0] += seconds
        return []

    def rate(seconds: float) -> float:
        return measure_beside(partial(steps, seconds=seconds), 4.0, Cost(2.0, 1e-6), cast("World", Alone()))

    assert [rate(seconds) for seconds in (8, 10, 6, 5)] == pytest.approx([4 / 6, 4 / 8, 1, 1])


def once(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_modules()}


def pairs(*layers: nn.Module) -> dict[str, str]:
    model = nn.Sequential(*layers)
    return pairs_of(model, once(model))


def fc() -> nn.Linear:
    return nn.Linear(4, 4)


def test_linear_layers_with_elementwise_modules_between() -> None:
    assert pairs(fc(), fc()) == {"0": "1"}
    assert pairs(fc(), nn.ReLU(), nn.Dropout(), fc(), nn.GELU(), fc()) == {"0": "3", "3": "5"}
    nested = nn.ModuleDict({"head": nn.Sequential(nn.Flatten(), fc(), nn.Tanh(), fc())})
    assert pairs_of(nested, once(nested)) == {"head.1": "head.3"}


def test_modules_that_need_all_features_are_not_crossed() -> None:
    for between in (
        nn.LayerNorm(4),
        nn.Softmax(-1),
        nn.Flatten(),
        nn.PReLU(),
        nn.Sequential(nn.ReLU()),
        nn.Conv1d(4, 4, 1),
    ):
        assert pairs(fc(), between, fc()) == {}


def test_what_others_may_read_is_not_paired() -> None:
    relu, first = nn.ReLU(), fc()
    assert pairs(first, relu, fc(), relu, fc()) == {"0": "2"}  # the second has another name
    twice = nn.Sequential(first, relu, fc(), relu, fc())
    assert pairs_of(twice, once(twice) - {"1"}) == {}
    norm = nn.LayerNorm(4)
    assert pairs(norm, fc(), norm, fc()) == {}
    assert pairs(first, nn.ReLU(), first) == {}
    seen = fc()
    seen.register_forward_hook(lambda *_: None)
    assert pairs(seen, fc()) == {}

    class Skipping(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + super().forward(x)

    odd = Skipping(fc(), fc())
    assert pairs_of(odd, once(odd)) == {}
    model = nn.Sequential(fc(), nn.ReLU(), fc())
    for name in ("", "0", "1", "2"):
        assert pairs_of(model, once(model) - {name}) == {}
