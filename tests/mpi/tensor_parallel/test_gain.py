"""The gain of split layers: measured in training, the same on all ranks, beside whole layers of the same shapes."""

from __future__ import annotations

import pytest
import torch
from tests.mpi.tensor_parallel.networks import CASES, model_of, train, with_sizes

import unisono
from unisono.plan.split import gradient_seconds
from unisono.step.costs import Cost
from unisono.tensor_parallel import gain, measure_gain
from unisono.tensor_parallel.gain import time_whole, whole_layer
from unisono.tensor_parallel.layer import ParallelLayer
from unisono.world import World

COST = Cost(1e-3, 1e-6)
PARTS = ["forward", "backward", "activations", "gradients", "together"]


@pytest.mark.parametrize(("name", "plan"), [(name, plan) for name, case in CASES.items() for plan in case.plans])
def test_each_split_layer_has_its_parts(group: World, name: str, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gain, "measure_link", lambda _: COST)
    whole = dict(model_of(CASES[name]).named_modules())
    model = unisono.parallel(model_of(CASES[name]), group, plan=with_sizes(CASES[name].plans[plan], group.size))
    assert measure_gain(model) == []  # nothing was trained
    train(model, torch.optim.SGD(model.parameters(), 0.05), CASES[name], group, range(3))
    layers = [one for one, layer in model.named_modules() if isinstance(layer, ParallelLayer)]
    found = measure_gain(model)
    assert set(map(repr, group.all_gather_object(found))) == {repr(found)}
    assert [(one.layer, one.part) for one in found] == [(layer, part) for layer in layers for part in PARTS]
    for one in found:
        assert one.measured == (one.part not in PARTS[3:])
        if one.part in ("forward", "backward"):
            assert min(one.split, one.unsplit) > 0
        if one.part == "activations":
            assert one.unsplit == 0
        if one.part == "gradients":
            weights = sum(own.nbytes for own in whole[one.layer].parameters())
            assert one.unsplit == gradient_seconds(weights, group.size, 1, COST)
            assert one.split == 0  # all ranks hold parts of their own
    for layer in layers:
        parts = {one.part: one for one in found if one.layer == layer}
        assert parts["together"].split == pytest.approx(sum(parts[part].split for part in PARTS[:4]))
        assert parts["together"].unsplit == pytest.approx(sum(parts[part].unsplit for part in PARTS[:4]))


@pytest.mark.parametrize("name", CASES)
def test_whole_layers_are_what_was_split(group: World, name: str) -> None:
    for plan in CASES[name].plans.values():
        before = dict(model_of(CASES[name]).named_modules())
        model = unisono.parallel(model_of(CASES[name]), group, plan=with_sizes(plan, group.size))
        for one, layer in model.named_modules():
            if isinstance(layer, ParallelLayer):
                whole = whole_layer(layer)
                assert type(whole) is type(before[one])
                assert {own: value.shape for own, value in whole.named_parameters()} == {
                    own: value.shape for own, value in before[one].named_parameters()
                }
                assert isinstance(layer, ParallelLayer)  # it stays split
                assert layer.parts


def test_a_layer_too_large_counts_as_long_as_the_split_one(group: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gain, "MAX_WHOLE_BYTES", 100)
    model = unisono.parallel(model_of(CASES["mlp"]), group, plan=with_sizes({"0": "column"}, group.size))
    train(model, torch.optim.SGD(model.parameters(), 0.05), CASES["mlp"], group, range(2))
    layer = model.get_submodule("0")
    if isinstance(layer, ParallelLayer):
        assert time_whole(layer, group.size, torch.no_grad) is None
    forward = measure_gain(model)[:1]
    assert [(one.split, one.measured) for one in forward] == [(one.unsplit, False) for one in forward]


def test_a_model_without_split_layers_has_none(group: World) -> None:
    model = unisono.parallel(model_of(CASES["mlp"]), group)
    assert measure_gain(model) == []
