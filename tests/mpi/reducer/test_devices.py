"""Models on a device: every rule trains them as on the host; the ranks of a node share the device."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import unisono
from unisono.collectives import allreduce as allreduce_module
from unisono.collectives import device_transports
from unisono.collectives.device_transports import Transports
from unisono.collectives.group import Group
from unisono.device import module_of
from unisono.engine.communicator_pool import CommunicatorPool
from unisono.errors import MismatchError, TensorError, UsageError
from unisono.placement import Placement
from unisono.reducer import reducer
from unisono.rules import BSP, BaseRule, DiLoCo, LocalSGD, Sharded
from unisono.world import World

STEPS = 4

MakeOptimizer = Callable[..., torch.optim.Optimizer]

RULES = {
    "bsp": BSP(),
    "sum": BSP(scale="sum"),
    "local sgd": LocalSGD(every=2),
    "diloco": DiLoCo(every=2, fragments=1),
    "sharded": Sharded(),
    "sharded, clipped": Sharded(clip=0.1),
}

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.05, 0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.01),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 5)
    return nn.Sequential(*layers).double()


def train(
    world: World, rule: BaseRule, optimizer_of: MakeOptimizer, device: torch.device, compiles: bool = False
) -> list[torch.Tensor]:
    """Weights and buffers after a few steps, on the host."""
    model = network().to(device)
    if compiles:
        model.compile(backend="eager")
    optimizer = optimizer_of(model.parameters())
    unisono.parallel(model, world, rule, optimizer)
    numbers = torch.Generator().manual_seed(world.rank)
    for _ in range(STEPS):
        inputs = torch.randn(4, 3, 6, 6, generator=numbers, dtype=torch.float64)
        labels = torch.randint(0, 5, (4,), generator=numbers)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device)).backward()
        optimizer.step()
    return [tensor.detach().cpu().clone() for tensor in model.state_dict().values()]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("rule", RULES)
def test_a_model_on_a_device_is_trained_as_on_the_host(
    world: World, device: torch.device, rule: str, optimizer: str
) -> None:
    here = train(world, RULES[rule], OPTIMIZERS[optimizer], torch.device("cpu"))
    there = train(world, RULES[rule], OPTIMIZERS[optimizer], device)
    limit = 1e-12 if device.type == "pretend" or optimizer == "sgd" else 1e-8  # Adam divides by small numbers
    for right, actual in zip(here, there, strict=True):
        torch.testing.assert_close(actual, right, rtol=limit, atol=limit)


@pytest.mark.parametrize("rule", ["bsp", "sharded"])
def test_a_compiled_model_on_a_device_is_trained_as_on_the_host(world: World, device: torch.device, rule: str) -> None:
    here = train(world, RULES[rule], OPTIMIZERS["sgd"], torch.device("cpu"))
    there = train(world, RULES[rule], OPTIMIZERS["sgd"], device, compiles=True)
    for right, actual in zip(here, there, strict=True):
        torch.testing.assert_close(actual, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rule", ["bsp", "local sgd", "diloco"])
def test_sums_may_stay_on_the_device(
    world: World, device: torch.device, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An MPI library that moves the device's memory: here the tensor is copied in its place."""
    if world.size == 1:
        pytest.skip("nothing is summed")
    staged: list[int] = []

    def direct(group: Group, tensor: torch.Tensor, op: str, wire: str | None, algorithm: str) -> None:
        staged.append(tensor.numel())
        allreduce_module.allreduce_staged(allreduce_module.allreduce, group, tensor, algorithm, wire, op)

    monkeypatch.setattr(allreduce_module, "allreduce_direct", direct)
    monkeypatch.setattr(allreduce_module, "is_direct", lambda *_: True)
    monkeypatch.setattr(allreduce_module, "transports_of", lambda *_: Transports(moves=True))
    here = train(world, RULES[rule], OPTIMIZERS["sgd"], torch.device("cpu"))
    there = train(world, RULES[rule], OPTIMIZERS["sgd"], device)
    assert bool(staged) == (rule != "diloco"), "changes of weights are computed and sent on the host"
    for right, actual in zip(here, there, strict=True):
        torch.testing.assert_close(actual, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_sums_of_gradients_by_a_backend_of_the_device(
    world: World, pretend: Callable[[int], torch.device], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which sums late, on a stream of its own; on two nodes where each has as many ranks."""
    if world.size == 1:
        pytest.skip("nothing is summed")
    importlib.import_module("unisono.testing.pretend_backend").use_pretend_backend()
    monkeypatch.setenv(device_transports.VARIABLE, "pretend_sums")
    monkeypatch.setattr(device_transports, "PROBE_BYTES", 1 << 10)
    monkeypatch.setattr(device_transports, "MIN_DIRECT_BYTES", 0)
    summed: list[torch.dtype] = []
    reduce = device_transports.NodeBackend._reduce
    monkeypatch.setattr(
        device_transports.NodeBackend, "_reduce", lambda *of: (summed.append(of[1].dtype), reduce(*of))[1]
    )
    nodes = [range(world.size)] if world.size != 4 else [(0, 2), (1, 3)]
    these = World(world.comm.Dup(), Placement(tuple(map(tuple, nodes))), world.table)
    here = train(these, RULES[rule], OPTIMIZERS["sgd"], torch.device("cpu"))
    for seed in range(3):
        there = train(these, RULES[rule], OPTIMIZERS["sgd"], pretend(seed))
        for right, actual in zip(here, there, strict=True):
            torch.testing.assert_close(actual, right, rtol=1e-12, atol=1e-12)
    assert (torch.float64 in summed) == (rule in ("bsp", "sum", "local sgd")), "others are summed on the host"
    del dist.Backend.default_device_backend_map["pretend"]


def test_a_graph_is_refused_and_the_loop_goes_on(
    world: World, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether its capture began before the forward pass or behind it, which a process that pretends dies of."""
    model = unisono.parallel(network().to(device), world)
    batch = torch.ones(2, 3, 6, 6, dtype=torch.float64, device=device)
    for behind in (False, True)[: 1 if device.type == "pretend" else 2]:
        with monkeypatch.context() as patch, pytest.raises(UsageError, match="before the model is made parallel"):
            loss = model(batch).sum() if behind else None
            patch.setattr(module_of(device), "is_current_stream_capturing", lambda: True, raising=False)
            (model(batch).sum() if loss is None else loss).backward()
    model.zero_grad()
    model(batch).sum().backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters() if parameter.grad is not None)


def test_a_model_on_two_devices_is_refused_on_all_ranks(world: World, device: torch.device) -> None:
    model = network()
    if world.rank == world.size - 1:
        model[4].to(device)
    with pytest.raises(TensorError, match=f"rank {world.size - 1}: a model: tensors on cpu and on {device.type}"):
        unisono.parallel(model, world)


def test_ranks_on_two_kinds_of_device_are_refused_on_all(world: World, device: torch.device) -> None:
    if world.size == 1:
        pytest.skip("one rank has one kind")
    last = world.size - 1
    model = network().to("cpu" if world.rank == last else device)
    message = (
        f"the models of ranks 0 and {last} differ: rank 0 has tensors on {device.type}, rank {last} has tensors on cpu"
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with pytest.raises(MismatchError, match=f"{message}: .* on the same kind of device"):
        unisono.parallel(model, world)
    with pytest.raises(MismatchError, match=message):
        unisono.Trainer(model, world, BSP(), optimizer)
    unisono.parallel(model.to(device), world)


def test_a_line_says_the_device_and_how_sums_travel(
    world: World, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    sums = f"; {world.device_transports(device)}" if world.size > 1 else ""
    for place, said in (("cpu", []), (device, [f"model on {device}{sums}"] * (world.rank == 0))):
        caplog.clear()
        with caplog.at_level("INFO", "unisono"):
            unisono.parallel(network().to(place), world)
        assert [record.message for record in caplog.records if record.message.startswith("model")] == said


def test_a_reducer_that_cannot_be_made_is_not_waited_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither at the end of the program, nor when the world is freed."""
    these = world.split(0)
    with monkeypatch.context() as patch, pytest.raises(UsageError, match="no memory"):
        patch.setattr(reducer, "BucketMemory", lambda *_: these.call_on_all(lambda: fail("no memory")))
        unisono.parallel(network(), these)
    these.resource(CommunicatorPool).finish()
    these.free()


def fail(message: str) -> None:
    raise UsageError(message)
