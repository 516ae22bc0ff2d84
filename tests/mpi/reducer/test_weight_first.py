"""Weight gradients first on real ranks: the same losses, exchanges that begin earlier, updates that wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import unisono
from unisono.engine import OperationSpan
from unisono.reducer import reducer_of, weight_first
from unisono.reducer.weight_first import compute_weight_gradients_first
from unisono.step.overlaps import OVERLAPS
from unisono.step.program import Task
from unisono.world import World

STEPS = 8
SMALL = unisono.Exchange(bucket_bytes=3_000)
"""Several buckets; a weight of `network` is cut into some of them."""


def network() -> nn.Module:
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, padding="same", groups=2)]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(256, 20), nn.Tanh(), nn.Linear(20, 10)).double()


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(4, 1, 8, 8, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 10, (4,), generator=generator)


def first_or_not(run: Callable[[Callable[[nn.Module], object]], list[float]]) -> tuple[list[float], list[float]]:
    """Return the losses of a run with the weight gradients first, and of one in PyTorch's order."""
    return run(compute_weight_gradients_first), run(lambda _: None)


RULES = {
    **{overlap: lambda overlap=overlap: unisono.BSP(SMALL, overlap) for overlap in OVERLAPS},
    "sharded": lambda: unisono.Sharded(SMALL, "chain"),
    "local_sgd": lambda: unisono.LocalSGD(SMALL, "chain", every=2),
}


@pytest.mark.parametrize(("name", "clip"), [*((name, None) for name in RULES), ("chain", 0.5), ("sharded", 0.5)])
def test_a_trainer_has_the_same_losses(group: World, name: str, clip: float | None) -> None:
    def run(order: Callable[[nn.Module], object]) -> list[float]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        trainer = unisono.Trainer(model, group, RULES[name](), optimizer, clip=clip)
        order(model)
        losses = [trainer.step(*batch(group.rank, step)) for step in range(STEPS)]
        trainer.wait()
        return [*losses, *(float(parameter.detach().sum()) for parameter in model.parameters())]

    first, plain = first_or_not(run)
    # the norm of shards is summed in the order of the buckets, which follows that of the gradients
    assert first == (plain if clip is None else pytest.approx(plain, rel=1e-12, abs=0))


class Shared(nn.Module):
    """Network whose middle layer is used twice, in the loss besides, and whose first layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.twice, self.last = (nn.Linear(64, 64).double() for _ in range(3))
        self.first.weight.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs.flatten(1)))
        hidden = torch.tanh(self.twice(torch.tanh(self.twice(hidden))))
        return self.last(hidden) + functional.linear(hidden, self.last.weight)


class Recomputed(nn.Module):
    """Network that recomputes its activations."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = network()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inside, inputs.requires_grad_(), use_reentrant=False)


def double(parameter: torch.Tensor) -> None:
    """Double a gradient."""
    parameter.grad.mul_(2)


def plain_loop(
    order: Callable[[nn.Module], object], model: nn.Module, world: World, hook: bool = False, accumulate: bool = False
) -> list[float]:
    """Return the losses of a loop of one's own; the loss has a term of all weights."""
    order(unisono.parallel(model, world, unisono.BSP(SMALL, "chain")))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if hook:
        trained[0].register_hook(lambda gradient: gradient * 0.5)
        trained[2].register_post_accumulate_grad_hook(double)
    optimizer, losses = torch.optim.SGD(trained, 0.05, momentum=0.9), []
    for step in range(STEPS):
        inputs, labels = batch(world.rank, step)
        if accumulate:
            with unisono.no_sync(model):
                functional.cross_entropy(model(inputs), labels).backward()
        loss = functional.cross_entropy(model(inputs), labels) + 1e-3 * sum(
            parameter.pow(2).sum() for parameter in trained
        )
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


LOOPS: dict[str, Callable[[Callable[[nn.Module], object], World], list[float]]] = {
    "own loop": lambda order, world: plain_loop(order, network(), world),
    "hooks": lambda order, world: plain_loop(order, network(), world, hook=True),
    "accumulation": lambda order, world: plain_loop(order, network(), world, accumulate=True),
    "shared and frozen weights": lambda order, world: plain_loop(order, Shared(), world),
    "checkpointing": lambda order, world: plain_loop(order, Recomputed(), world),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_of_ones_own_has_the_same_losses(group: World, name: str) -> None:
    first, plain = first_or_not(lambda order: LOOPS[name](order, group))
    assert first == plain


def test_gradients_of_autograd_grad_are_not_exchanged(group: World) -> None:
    model, own = network(), network()
    compute_weight_gradients_first(unisono.parallel(model, group, unisono.BSP(SMALL, "chain")))
    begun: list[object] = []
    reducer_of(model).observe = begun.append
    inputs, labels = batch(group.rank, 0)
    actual, wanted = (
        torch.autograd.grad(functional.cross_entropy(module(inputs), labels), list(module.parameters()))
        for module in (model, own)
    )
    assert all(map(torch.equal, actual, wanted))
    assert not begun
    functional.cross_entropy(model(inputs), labels).backward()  # and the next pass is exchanged
    assert begun or group.size == 1


class Chain(nn.Module):
    """Linear layers, each a bucket of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(4)).double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        return inputs


class Watch:
    """Ends of the tasks of each bucket."""

    def __init__(self) -> None:
        self._ended: dict[str, threading.Event] = {}

    def __call__(self, span: OperationSpan) -> None:
        if isinstance(span.about, Task):
            self.of(str(span.about)).set()

    def of(self, name: str) -> threading.Event:
        """Return the event of a task."""
        return self._ended.setdefault(name, threading.Event())


def late_grad_inputs(monkeypatch: pytest.MonkeyPatch, wait: Callable[[int], None]) -> list[int]:
    """Have `wait` called with the number of each input gradient, from 1 on, before it is computed."""
    own, computed = weight_first.linear_gradients, list[int]()

    def late(*parts: Any) -> Any:
        if parts[-1][0]:
            computed.append(len(computed) + 1)
            wait(computed[-1])
        return own(*parts)

    monkeypatch.setattr(weight_first, "linear_gradients", late)
    return computed


def inputs_of(rank: int) -> torch.Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(rank)).double()


def chain_rule(parts: int = 1) -> unisono.BSP:
    """Return a rule that sends each layer in so many buckets."""
    return unisono.BSP(unisono.Exchange(bucket_bytes=32 * 32 * 8 // parts), "chain")


@pytest.mark.parametrize("parts", [1, 2])
def test_the_exchange_of_a_layer_ends_before_its_grad_input_begins(
    group: World, monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    if group.size == 1:
        pytest.skip("one rank exchanges nothing")
    watch, model = Watch(), Chain()
    compute_weight_gradients_first(unisono.parallel(model, group, chain_rule(parts)))
    reducer_of(model).observe = watch
    exchanged: list[bool] = []
    computed = late_grad_inputs(
        monkeypatch, lambda layer: exchanged.append(watch.of(f"allreduce {layer * parts}").wait(60))
    )
    model(inputs_of(group.rank)).sum().backward()
    assert computed == [1, 2, 3], "the first layer's input needs no gradient"
    assert exchanged == [True] * 3


def test_an_update_waits_for_the_grad_input(group: World, monkeypatch: pytest.MonkeyPatch) -> None:
    if group.size == 1:
        pytest.skip("one rank exchanges nothing")
    serial = Chain()
    sum(serial(inputs_of(rank)).sum() for rank in range(group.size)).div(group.size).backward()
    torch.optim.SGD(serial.parameters(), 0.5).step()

    watch, model = Watch(), Chain()
    trainer = unisono.Trainer(
        model, group, chain_rule(), torch.optim.SGD(model.parameters(), 0.5), loss=lambda outputs, _: outputs.sum()
    )
    compute_weight_gradients_first(model)
    trainer.reducer.observe = watch
    engine = trainer.reducer.programs.player.engine

    def wait(layer: int) -> None:
        assert watch.of(f"set_grads {layer}").wait(60)
        for _ in range(2):  # whatever the only thread of updates may do now, it has done after that
            engine.push(lambda: None, (), (), "update", "nothing").wait()

    computed = late_grad_inputs(monkeypatch, wait)
    trainer.step(inputs_of(group.rank), torch.zeros(8))
    trainer.wait()
    assert computed == [1, 2, 3]
    for parameter, expected in zip(model.parameters(), serial.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=0, atol=1e-12)
