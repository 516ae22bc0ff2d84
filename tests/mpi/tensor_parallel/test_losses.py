"""Split networks have the losses of whole ones: for each layer, plan, group size, and hybrids of both kinds."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from tests.mpi.tensor_parallel.networks import CASES, SAMPLES, Case, alone, batch, model_of, normal, train, with_sizes
from torch import nn

import unisono
from unisono.errors import MismatchError
from unisono.optimizers import LAMB, LARS
from unisono.schedules.pieces import bounds
from unisono.tensor_parallel.model import (
    clip_grad_norm,
    seed_dropout,
    split_model,
    whole_optimizer_state,
    whole_state_dict,
)
from unisono.world import World

Gradients = dict[str, torch.Tensor]

STEPS = 6

FOR_LONG = {
    ("vgg", "wide"),
    ("alexnet", "wide"),
    ("cd_dnn", "pairs"),
    ("transformer", "block"),
    ("words", "rows"),
    ("encoder", "heads"),
}
"""Networks and plans that train for 20 steps: one of each kind."""


def sizes_of(group: World) -> list[int]:
    """Sizes of groups that split something, where there are several ranks."""
    return [size for size in (2, 3, 4) if group.size % size == 0] or [1]


@pytest.mark.parametrize(("name", "plan"), [(name, plan) for name, case in CASES.items() for plan in case.plans])
def test_split_networks_have_the_losses_of_whole_ones(group: World, name: str, plan: str) -> None:
    case = CASES[name]
    longer, _ = alone(case, 12)
    assert sum(longer[-4:]) < sum(longer[:4]), "a network that learns nothing is like any other"
    steps = 20 if (name, plan) in FOR_LONG else STEPS
    expected, trained = alone(case, steps)
    for size in sizes_of(group):
        model = unisono.parallel(model_of(case), group, plan=with_sizes(case.plans[plan], size))
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)
        losses = train(model, optimizer, case, group, range(steps))
        assert losses == pytest.approx(expected, rel=1e-9), size
        full_state = whole_state_dict(model)
        for key, value in full_state.items():
            torch.testing.assert_close(value, trained.state_dict()[key], rtol=1e-8, atol=1e-9)


def test_groups_across_nodes(spread: World) -> None:
    """Activations go by messages where ranks of a group are on different nodes."""
    case, steps = CASES["mlp"], 6
    expected, _ = alone(case, steps)
    for size in sizes_of(spread):
        model = unisono.parallel(model_of(case), spread, plan=with_sizes(case.plans["chain"], size))
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)
        assert train(model, optimizer, case, spread, range(steps)) == pytest.approx(expected, rel=1e-9), size


def gradients_of(world: World, rule: unisono.BSP, plan: Mapping[str, str] | None) -> tuple[nn.Module, Gradients]:
    """A network of float32, and the gradients of a batch of which each rank has its share, by their names."""
    case, mine = CASES["vgg"], slice(*bounds(SAMPLES, world.size, world.rank))
    model, (inputs, labels) = unisono.parallel(model_of(case).float().eval(), world, rule, plan=plan), batch(case, 0)
    nn.functional.cross_entropy(model(inputs[mine].float()), labels[mine]).backward()
    return model, {name: parameter.grad for name, parameter in model.named_parameters()}


def test_a_wire_rounds_gradients_beside_split_layers_as_without(spread: World) -> None:
    """Two nodes exchange bfloat16: numbers of 8 bits, each rounded where it is sent, and its sum once more."""
    rule = unisono.BSP(unisono.Exchange(wire="bfloat16"))
    _, exact = gradients_of(spread, unisono.BSP(), None)
    _, unsplit = gradients_of(spread, rule, None)
    for size in sizes_of(spread):
        model, gradients = gradients_of(spread, rule, with_sizes(CASES["vgg"].plans["wide"], size))
        for name, gradient in gradients.items():
            layer, _, parameter = name.rpartition(".")
            part = getattr(model.get_submodule(layer), "parts", {}).get(parameter)
            for other in (exact, unsplit):
                expected = other[name] if part is None else part.cut(other[name])
                torch.testing.assert_close(gradient, expected, rtol=0, atol=float(other[name].abs().max()) / 64)
        off = float((gradients["0.weight"] - exact["0.weight"]).abs().max() / exact["0.weight"].abs().max())
        assert (off > 2**-12) == (spread.nodes > 1), "what crosses nodes is rounded"


@pytest.mark.parametrize(
    ("name", "samples"),
    [
        ("mlp", 7),
        ("transformer", 7),
        ("mlp", 2),
        ("vgg", 2),
        ("transformer", 2),
        ("words", 2),
        ("encoder", 7),
        ("encoder", 2),
    ],
)
def test_uneven_and_empty_shares(group: World, name: str, samples: int) -> None:
    case, steps = CASES[name], 6
    expected, _ = alone(case, steps, samples)
    for plan, size in product(case.plans.values(), sizes_of(group)):
        model = unisono.parallel(model_of(case), group, plan=with_sizes(plan, size))
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)
        assert train(model, optimizer, case, group, range(steps), samples) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("make", "overlap"), [(torch.optim.SGD, "chain"), (LARS, "none"), (LAMB, "chain")])
def test_sharded_updates_of_split_layers(group: World, make: type[torch.optim.Optimizer], overlap: str) -> None:
    """Each rank updates its share of its part; LARS and LAMB have the norms of whole layers."""
    case, steps = CASES["vgg"], 6
    own_world = group.split(group.rank)
    unsplit = split_model(model_of(case), own_world, {})
    serial = make(unsplit.parameters(), 0.05)
    unisono.parallel(unsplit, own_world, unisono.Sharded(clip=0.5), serial)
    expected = train(unsplit, serial, case, own_world, range(steps))
    for size in sizes_of(group):
        model, rule = model_of(case), unisono.Sharded(clip=0.5, overlap=overlap)
        optimizer = make(model.parameters(), 0.05)
        unisono.parallel(model, group, rule, optimizer, plan=with_sizes(case.plans["wide"], size))
        assert train(model, optimizer, case, group, range(steps)) == pytest.approx(expected, rel=1e-9), size
        state = whole_optimizer_state(model, optimizer)
        if group.rank == 0:
            serials = serial.state_dict()["state"]
            assert state["state"].keys() == serials.keys()
            for index, entries in state["state"].items():
                torch.testing.assert_close(entries, serials[index], rtol=1e-8, atol=1e-12)
    own_world.free()


def accumulated(
    model: nn.Module, optimizer: torch.optim.Optimizer, case: Case, world: World, steps: range
) -> list[float]:
    """Train on two batches in each step, with clipping. Return the loss of the second, and the norm before, of each."""
    numbers, mine = [], slice(*bounds(SAMPLES, world.size, world.rank))
    for step in steps:
        optimizer.zero_grad()
        for sums, drawn in ((False, step), (True, step + 1)):
            inputs, labels = batch(case, drawn)
            seed_dropout(model, 7, drawn, mine.start)
            with nullcontext() if sums else unisono.no_sync(model):
                loss = nn.functional.cross_entropy(model(inputs[mine]), labels[mine])
                loss.backward()
        numbers += [float(world.allreduce(loss.detach() / world.size)), clip_grad_norm(model, 0.5)]
        optimizer.step()
    return numbers


@pytest.mark.parametrize(("make", "rate"), [(LARS, 5.0), (LAMB, 0.005)])
@pytest.mark.parametrize(("name", "plan"), [("vgg", "wide"), ("words", "rows")])
def test_layerwise_updates_of_split_layers(
    group: World, make: type[LARS] | type[LAMB], rate: float, name: str, plan: str
) -> None:
    """LARS and LAMB have the norms of whole layers in a loop of one's own: 20 steps, half of them by an optimizer that
    was made before the split, which has passed its state to one that was made behind it."""
    case, own_world = CASES[name], group.split(group.rank)
    unsplit = unisono.parallel(split_model(model_of(case), own_world, {}), own_world)
    serial = make(unsplit.parameters(), rate, weight_decay=1e-3)
    expected = accumulated(unsplit, serial, case, own_world, range(20))
    assert sum(expected[-8::2]) < sum(expected[:8:2]), "a network that learns nothing is like any other"
    for size in sizes_of(group):
        model = model_of(case)
        before = make(model.parameters(), rate, weight_decay=1e-3)
        unisono.parallel(model, group, unisono.BSP(), before, plan=with_sizes(case.plans[plan], size))
        numbers = accumulated(model, before, case, group, range(10))
        behind = make(model.parameters(), 1.0)
        behind.load_state_dict(before.state_dict())
        numbers += accumulated(model, behind, case, group, range(10, 20))
        assert numbers == pytest.approx(expected, rel=1e-9), size
        weights, state = whole_state_dict(model), whole_optimizer_state(model, behind)
        if group.rank == 0:
            torch.testing.assert_close(weights, {**unsplit.state_dict()}, rtol=1e-8, atol=1e-9)
            for index, entries in state["state"].items():
                torch.testing.assert_close(entries, serial.state_dict()["state"][index], rtol=1e-8, atol=1e-9)
    own_world.free()


def test_one_layerwise_optimizer_of_two_split_models(group: World) -> None:
    """Each has groups of its own; a layer of no parallel model has its own norms."""
    own_world, trained = group.split(group.rank), []
    for world, size in ((own_world, 1), (group, group.size)):
        torch.manual_seed(0)
        first, second, other = (nn.Sequential(nn.Linear(12, 12)).double() for _ in range(3))
        for model, how in ((first, "column"), (second, "row")):
            unisono.parallel(model, world, plan={"0": f"{how} {size}"})
        optimizer = LARS([*first.parameters(), *second.parameters(), *other.parameters()], 50.0)
        for _ in range(3):
            optimizer.zero_grad()
            inputs = torch.eye(12, dtype=torch.float64)
            (second(first(inputs)).square().mean() + other(inputs).square().mean()).backward()
            optimizer.step()
        trained.append((first(inputs), second(inputs), other(inputs)))
    torch.testing.assert_close(trained[0], trained[1], rtol=1e-9, atol=1e-12)
    own_world.free()


def test_a_rank_that_lacks_the_gradient_of_a_part_is_reported(group: World) -> None:
    """The norm of the whole layer would lack that part."""
    own = group.dup()
    model = unisono.parallel(nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12)), own, plan={"0": "column"})
    optimizer = LARS(model.parameters(), 0.1)
    model(torch.ones(2, 12)).sum().backward()
    if group.rank == 0:
        model[0].weight.grad = None
    if group.size > 1:
        with pytest.raises(MismatchError, match=r"allreduce\([24] x float64.* but rank"):
            optimizer.step()


def test_an_unsplit_layer_computes_own_samples_and_a_split_one_those_of_its_group(group: World) -> None:
    """PCL-DNN's hybrid: the convolution has B / p samples on each rank, the wide layers G B / p."""
    case, seen = CASES["vgg"], dict[str, int]()
    for size in sizes_of(group):
        model = unisono.parallel(model_of(case), group, plan=with_sizes(case.plans["wide"], size))
        for name in ("0", "3", "8", "9", "11"):
            model.get_submodule(name).register_forward_hook(
                lambda _, inputs, __, name=name: seen.update({name: len(inputs[0])})
            )
        train(model, torch.optim.SGD(model.parameters(), 0.05), case, group, range(1))
        own = SAMPLES // group.size
        assert seen == {"0": own, "3": own, "8": size * own, "9": size * own, "11": own}


def test_batch_norm_beside_split_layers(group: World) -> None:
    """Norms have the statistics of own samples, as in data parallelism."""
    case = Case(
        lambda: nn.Sequential(nn.Conv2d(2, 24, 3), nn.BatchNorm2d(24), nn.ReLU(), nn.Flatten(), nn.Linear(96, 5)),
        {},
        normal(2, 4, 4),
    )
    unsplit = unisono.parallel(model_of(case), group)
    expected = train(unsplit, torch.optim.SGD(unsplit.parameters(), 0.05, momentum=0.9), case, group, range(6))
    model = unisono.parallel(model_of(case), group, plan={"0": "column", "4": "row"})
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    assert train(model, optimizer, case, group, range(6)) == pytest.approx(expected, rel=1e-9)
    torch.testing.assert_close(model[1].running_mean, unsplit[1].running_mean, rtol=1e-9, atol=1e-12)


def test_one_input_of_several_layers_is_gathered_once(group: World) -> None:
    model = unisono.parallel(model_of(CASES["transformer"]), group, plan=CASES["transformer"].plans["block"])
    gathers = [
        name for name in graph_of(model(batch(CASES["transformer"], 0)[0]).sum()) if name == "_LayoutChangeBackward"
    ]
    assert len(gathers) == (4 if group.size > 1 else 0)  # in and out of attention, and of the two layers behind it


def graph_of(loss: torch.Tensor) -> list[str]:
    """Names of the nodes of a loss's graph."""
    names, left = dict[Any, str](), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in names:
            names[node] = node.name()
            left += [following for following, _ in node.next_functions]
    return list(names.values())
