"""The overlap `phases` on pretended nodes of several ranks: gradients, wires and bits are those of one sum."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.mpi.reducer.shares import batches
from torch import nn

import unisono
from unisono.placement import place
from unisono.reducer import reducer_of
from unisono.rules import LocalSGD
from unisono.step.program import Step
from unisono.world import World

SIZE = 20_000
"""Bytes of the largest bucket: there are three."""


@pytest.fixture(params=["even", "uneven"])
def nodes(request: pytest.FixtureRequest, world: World) -> Iterator[World]:
    """All ranks, on two nodes by turns, or rank 0 on a node of its own."""
    placement = place([rank % 2 if request.param == "even" else rank > 0 for rank in range(world.size)])
    nodes = World(world.comm.Dup(), placement, world.table)
    yield nodes
    nodes.free()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 80), nn.Tanh(), nn.Linear(80, 10)).double()


def trained(world: World, rule: unisono.BSP | LocalSGD, steps: int = 4) -> list[torch.Tensor]:
    """Weights after some steps, the same on all ranks."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    trainer = unisono.Trainer(model, world, rule, optimizer)
    for inputs, labels in batches(world, steps):
        trainer.step(inputs.double(), labels)
    trainer.wait()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    for first, own in zip(world.call_on_root(lambda: weights), weights, strict=True):
        assert torch.equal(own, first)
    return weights


def distance(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    return max(float((mine - its).abs().max()) for mine, its in zip(first, second, strict=True))


def test_gradients_are_those_of_the_whole_batch(nodes: World) -> None:
    model, serial = network(), network()
    unisono.parallel(model, nodes, unisono.BSP(unisono.Exchange(bucket_bytes=SIZE), "phases"))
    alone = nodes.split(nodes.rank)
    for (inputs, labels), (all_inputs, targets) in zip(batches(nodes, 4), batches(alone, 4), strict=True):
        for net, (given, wanted) in ((model, (inputs, labels)), (serial, (all_inputs, targets))):
            net.zero_grad()
            nn.functional.cross_entropy(net(given.double()), wanted).backward()
        for own, right in zip(model.parameters(), serial.parameters(), strict=True):
            torch.testing.assert_close(own.grad, right.grad, rtol=0, atol=1e-9)
    alone.free()
    reducer = reducer_of(model)
    assert reducer is not None
    layout = reducer.programs.layout()
    assert bool(layout.phases) == (nodes.size > 2)
    names = {task.operation.name for task in reducer.rule(Step(0), nodes.rank, layout)}
    assert ("node_copy" in names) == any(nodes.rank in each and len(each) > 1 for each in layout.nodes)


def test_pieces_of_a_device_are_sent_as_in_chain(nodes: World, device: torch.device) -> None:
    model = network().to(device)
    unisono.parallel(model, nodes, unisono.BSP(unisono.Exchange(bucket_bytes=SIZE), "phases"))
    inputs, labels = next(batches(nodes, 1))
    nn.functional.cross_entropy(model(inputs.double().to(device)), labels.to(device)).backward()
    reducer = reducer_of(model)
    assert reducer is not None
    assert reducer.programs.layout().phases == ()


@pytest.mark.parametrize("every", [0, 1])
def test_weights_are_those_of_chain(nodes: World, every: int) -> None:
    """Averages of gradients, and of weights."""
    exchange = unisono.Exchange(bucket_bytes=SIZE)
    rules = (
        LocalSGD(exchange, name, every=every) if every else unisono.BSP(exchange, name) for name in ("phases", "chain")
    )
    assert distance(*(trained(nodes, rule) for rule in rules)) < 1e-12


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
def test_a_wire_rounds_between_the_nodes_alone(nodes: World, wire: str) -> None:
    plain, rounded = (
        trained(nodes, unisono.BSP(unisono.Exchange(wire=wire_format, bucket_bytes=SIZE), "phases"))
        for wire_format in (None, wire)
    )
    assert (0 if nodes.size == 1 else 1e-6) <= distance(plain, rounded) < 1e-2


def test_exact_sums_have_the_bits_of_chain(nodes: World) -> None:
    exchange = unisono.Exchange(wire="exact", bucket_bytes=SIZE)
    phases, chain = (trained(nodes, unisono.BSP(exchange, name)) for name in ("phases", "chain"))
    assert distance(phases, chain) == 0
