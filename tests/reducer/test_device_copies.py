"""Copies between buckets on a device and on the host: right in any order of streams, wrong without a synchronization.

One rank alone sends nothing, so it is told that its sums are computed on the host. The device pretends: the order in
which its streams run comes from a seed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import unisono
from unisono.collectives.staged import allreduce_staged
from unisono.device import CopyStreams, computed_of, copy_behind
from unisono.reducer import bucket_memory
from unisono.reducer.buffers import Buffers
from unisono.reducer.device_copies import BucketCopies
from unisono.rules import BSP, BaseRule, LocalSGD
from unisono.world import World

ORDERS = int(os.environ.get("ORDERS", "20"))
"""Seeds of orders, in which nothing may go wrong, and one at least does where a synchronization is missing."""

Order = Callable[[int], torch.device]


@pytest.fixture(scope="module")
def world() -> World:
    return unisono.init()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double()


def train(world: World, rule: BaseRule, device: str, steps: int = 3) -> list[torch.Tensor]:
    """Weights after steps of a loop of the user's own."""
    model = network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    unisono.parallel(model, world, rule, optimizer)
    for step in range(steps):
        inputs = torch.arange(20.0, dtype=torch.float64).view(5, 4).sin() + step
        optimizer.zero_grad()
        model(inputs.to(device)).square().sum().backward()
        optimizer.step()
    return [tensor.detach().cpu() for tensor in model.state_dict().values()]


def step_in_parts(world: World, device: str) -> list[torch.Tensor]:
    """Weights after steps whose updates are tasks of the program."""
    model = network().to(device)
    trainer = unisono.Trainer(
        model, world, BSP(), torch.optim.SGD(model.parameters(), 0.1), loss=lambda out, _: out.sum()
    )
    for step in range(3):
        inputs = torch.arange(20.0, dtype=torch.float64).view(5, 4).sin() + step
        trainer.step(inputs.to(device), torch.zeros(1).to(device))
    trainer.wait()
    return [tensor.detach().cpu() for tensor in model.state_dict().values()]


def double_on_the_host(_: World, device: str) -> list[torch.Tensor]:
    """A staged allreduce that doubles, and what is computed before and after it."""

    def doubling(_: Any, tensor: torch.Tensor, *__: Any) -> torch.Tensor:
        return tensor.mul_(2)

    tensor = torch.arange(1000.0, dtype=torch.float64).to(device).square().add(1)
    if device == "cpu":
        doubling(None, tensor)
    else:
        allreduce_staged(doubling, SimpleNamespace(size=1, rank=0), tensor, "auto", None, "sum")  # type: ignore[arg-type]
    return [tensor.mul(3).cpu()]


def copy_buffers(_: World, device: str) -> list[torch.Tensor]:
    """Buffers of a batch norm, as they are sent."""
    norm = nn.BatchNorm1d(4).double().to(device)
    buffers = Buffers(norm)
    norm(torch.arange(20.0, dtype=torch.float64).view(5, 4).to(device).square())
    buffers.pack()
    return [buffers.flat.clone()]


def copy_a_value(_: World, device: str) -> list[torch.Tensor]:
    """A value that another thread copies to the host, and back."""
    value = torch.arange(100.0).to(device).square().mul(2)
    host = torch.zeros(100)
    if device != "cpu":
        torch.get_device_module(device).register_host_memory(host)
    copy_behind(host, value, computed_of(value))
    return [host.clone()]


def pack(world: World, device: str) -> list[torch.Tensor]:
    """A bucket of gradients that are freed when it was packed, while the program computes on."""
    parameters = [nn.Parameter(torch.zeros(size, device=device)) for size in (300, 500)]
    memory = bucket_memory.BucketMemory(parameters, world)
    memory.lay_out([1, 0], 1 << 20)
    fresh: dict[int, torch.Tensor | None] = {
        index: parameter.detach() + index + 1 for index, parameter in enumerate(parameters)
    }
    memory.record_progress(1)
    memory.pack(1, fresh, 0.5)
    fresh.clear()
    for _ in range(3):
        torch.zeros(500, device=device).add_(7)
    return [memory.sums(1).clone()]


def lend_weights(world: World, device: str) -> list[torch.Tensor]:
    """Weights of another that a model has within a block, and its own behind it, both read by the device."""
    model = network().to(device)
    trainer = unisono.Trainer(
        model, world, BSP(), torch.optim.SGD(model.parameters(), 0.1), loss=lambda out, _: out.sum()
    )
    inputs = torch.arange(20.0, dtype=torch.float64).view(5, 4).sin()
    trainer.step(inputs.to(device), torch.zeros(1).to(device))
    weights, seen = trainer.reducer.weights, list[torch.Tensor]()
    other = {key: flat.mul(3) for key, flat in weights.flats().items()}
    with weights.centre(other, None):
        seen += [parameter.detach().square() for parameter in model.parameters()]
    seen += [parameter.detach().square() for parameter in model.parameters()]
    return [tensor.cpu() for tensor in seen]


SCENES: dict[str, Callable[[World, str], list[torch.Tensor]]] = {
    "own loop": lambda world, device: train(world, BSP(), device),
    "weights": lambda world, device: train(world, LocalSGD(every=1), device),
    "parts": step_in_parts,
    "pack": pack,
    "staged": double_on_the_host,
    "buffers": copy_buffers,
    "lent": lend_weights,
    "value": copy_a_value,
}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets that are copied to the host though there is no other rank, and are halved there, as by a sum."""
    monkeypatch.setattr(BSP, "exchanges_nothing", lambda *_: False)
    monkeypatch.setattr(bucket_memory, "BucketCopies", lambda device, host, _: BucketCopies(device, host, False))
    allreduce = World.allreduce

    def halving(world: World, tensor: torch.Tensor, *options: Any, **named: Any) -> torch.Tensor:
        return tensor.mul_(0.5) if options else allreduce(world, tensor, **named)  # a bucket's call has options

    monkeypatch.setattr(World, "allreduce", halving)


def goes_wrong(world: World, pretend: Order, scene: str) -> bool:
    """Return whether there are other numbers than on the host in some order."""
    right = SCENES[scene](world, "cpu")
    return any(
        not torch.allclose(result, other, 1e-12, 1e-12)
        for seed in range(ORDERS)
        for result, other in zip(SCENES[scene](world, str(pretend(seed))), right, strict=True)
    )


@pytest.mark.usefixtures("sent")
@pytest.mark.parametrize("scene", SCENES)
def test_no_order_of_streams_is_wrong(world: World, pretend: Order, scene: str) -> None:
    assert not goes_wrong(world, pretend, scene)


def without_host_waits(patch: pytest.MonkeyPatch) -> None:
    """The host waits for no copy."""
    record = CopyStreams.record
    patch.setattr(CopyStreams, "record", lambda self: Unwaited(record(self)))


class Unwaited:
    """Event that streams wait for, and the host does not."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def synchronize(self) -> None:
        """Go on."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.event, name)


def on_without_events(patch: pytest.MonkeyPatch) -> None:
    """Copies wait for nothing that was computed."""
    begin = CopyStreams._on
    patch.setattr(CopyStreams, "_on", lambda self, stream, _: begin(self, stream, ()))


def outgoing_without_a_mark(patch: pytest.MonkeyPatch) -> None:
    """A bucket is packed before its gradients are complete."""
    patch.setattr(BucketCopies, "outgoing", lambda self, key: self._streams.outgoing(self._leaving.get(key)))


def incoming_without_a_mark(patch: pytest.MonkeyPatch) -> None:
    """Weights are read before the step of the user's optimizer has changed them."""
    begin = BucketCopies.incoming
    patch.setattr(BucketCopies, "incoming", lambda self, marked: begin(self, False))


def without_later_marks(patch: pytest.MonkeyPatch) -> None:
    """Only the first gradients are waited for."""
    record = BucketCopies.record_progress
    patch.setattr(BucketCopies, "record_progress", lambda self, key=0: None if self._marks else record(self, key))


def without_a_join(patch: pytest.MonkeyPatch) -> None:
    """The program goes on before gradients have come."""
    patch.setattr(BucketCopies, "join", lambda _: None)


def without_an_end(patch: pytest.MonkeyPatch) -> None:
    """The program goes on behind its own work alone, in a staged collective."""
    patch.setattr(CopyStreams, "wait", lambda self, event: None)


def without_records(patch: pytest.MonkeyPatch) -> None:
    """Gradients are freed while another stream reads them."""
    patch.setattr(torch.Tensor, "record_stream", lambda *_: None)


def without_settling(patch: pytest.MonkeyPatch) -> None:
    """The host reads a bucket that is on its way."""
    patch.setattr(BucketCopies, "arrivals", lambda self, key: iter([piece for piece, _ in self._arriving.pop(key, ())]))


def buffers_before_they_arrive(patch: pytest.MonkeyPatch) -> None:
    """Buffers are sent while they are copied."""
    patch.setattr(Buffers, "flat", property(lambda self: self._flat))


REMOVED: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
    (without_host_waits, "staged"),
    (on_without_events, "staged"),
    (on_without_events, "value"),
    (outgoing_without_a_mark, "own loop"),
    (incoming_without_a_mark, "weights"),
    (without_later_marks, "own loop"),
    (without_later_marks, "lent"),
    (without_a_join, "own loop"),
    (without_a_join, "parts"),
    (without_an_end, "staged"),
    (without_records, "pack"),
    (without_settling, "own loop"),
    (buffers_before_they_arrive, "buffers"),
]


@pytest.mark.usefixtures("sent")
@pytest.mark.parametrize(("removed", "scene"), REMOVED, ids=lambda value: getattr(value, "__name__", value))
def test_a_missing_synchronization_is_seen(
    world: World,
    pretend: Order,
    monkeypatch: pytest.MonkeyPatch,
    removed: Callable[[pytest.MonkeyPatch], None],
    scene: str,
) -> None:
    removed(monkeypatch)
    assert goes_wrong(world, pretend, scene)
