"""Models of every kind: parallel equals serial to 1e-12 in float64, or the model is refused by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import unisono
from unisono.errors import UsageError
from unisono.world import World

RATE, STEPS = 0.1, 4


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.decode.weight = self.encode.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.decode(torch.tanh(self.encode(inputs)))


class Extra(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"version": 3}


class Unused(nn.Module):
    """One layer that nobody uses, and one that the even steps of even inputs use."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.never, self.some = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out = self.used(inputs)
        return out + self.some(inputs) if float(inputs.detach().sum()) > 0 else out


class Checkpointed(nn.Module):
    """Two towers that are computed again in the backward pass, block by block."""

    def __init__(self, inner: bool) -> None:
        super().__init__()
        self.one, self.two = (nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)) for _ in range(2))
        self.inner = inner

    def tower(self, inputs: torch.Tensor, name: str) -> torch.Tensor:
        return checkpoint(getattr(self, name), inputs, use_reentrant=False) if self.inner else self(inputs, name)

    def forward(self, inputs: torch.Tensor, name: str = "") -> torch.Tensor:
        if name:
            return getattr(self, name)(inputs)
        if self.inner:
            return self.tower(inputs, "one") * self.tower(inputs, "two")
        return checkpoint(self, inputs, "one", use_reentrant=False) * checkpoint(
            self, inputs, "two", use_reentrant=False
        )


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 5, num_layers=2, batch_first=True), nn.Linear(5, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(inputs[:, None].expand(-1, 3, -1))[0][:, -1])


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 3, sparse=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.words((inputs.abs() * 10).long() % 10)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex128))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(inputs.to(torch.complex128) @ self.weight)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def shared() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.ModuleDict({"again": layer})["again"])


def frozen() -> nn.Module:
    model = plain()
    model[0].requires_grad_(requires_grad=False)
    return model


def spectral() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3))


def compiled() -> nn.Module:
    model = plain()
    model.compile(backend="aot_eager", fullgraph=True)
    return model


def unfreeze(model: nn.Module) -> None:
    model[0].requires_grad_(requires_grad=True)


def add(model: nn.Module) -> None:
    torch.manual_seed(1)
    model.append(nn.Linear(3, 3).double())


def replace(model: nn.Module) -> None:
    torch.manual_seed(1)
    model[2] = nn.Linear(5, 3).double()


def assign(model: nn.Module) -> None:
    model.load_state_dict({name: value.clone() + 0.1 for name, value in model.state_dict().items()}, assign=True)


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    change: Callable[[nn.Module], None] | None = None
    """Done after the first step."""
    refused: str = ""
    """The error where the model may be refused instead: it names the parameter."""


CASES = {
    "plain": Case(plain),
    "tied": Case(Tied),
    "extra state": Case(Extra),
    "frozen": Case(frozen),
    "shared": Case(shared),
    "unused": Case(Unused),
    "checkpointed blocks": Case(lambda: Checkpointed(inner=True)),
    "checkpointed calls of the whole": Case(lambda: Checkpointed(inner=False)),
    "spectral norm": Case(spectral),
    "LSTM": Case(Recurrent),
    "compiled": Case(compiled),
    "sparse": Case(Words, refused="words"),
    "complex": Case(Complex, refused="weight"),
    "unfrozen": Case(frozen, unfreeze, r"0\.(weight|bias)"),
    "added": Case(plain, add, r"3\.(weight|bias)"),
    "replaced": Case(plain, replace, r"2\.(weight|bias)"),
    "assigned": Case(plain, assign, r"\d\.(weight|bias)"),
}


def share(step: int, rank: int) -> torch.Tensor:
    """Uneven; ranks and steps differ in the sign of their sum."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(2 + (rank + step) % 3, 4, generator=generator).double()


def loss_of(out: torch.Tensor, _: torch.Tensor | None = None) -> torch.Tensor:
    return out.square().flatten(1).sum(dim=1).mean()


def make(case: Case) -> nn.Module:
    torch.manual_seed(0)
    model = case.make()
    return model if isinstance(model, Complex) else model.double()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], RATE)


def serial(case: Case, ranks: int, passes: int = 1) -> nn.Module:
    """Each rank's share is a part of one batch, with its own forward pass, weighted by its samples."""
    model = make(case)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        if step == 1 and case.change is not None:
            case.change(model)
            optimizer = optimizer_of(model)
        shares = [share(step, rank) for rank in range(ranks)]
        optimizer.zero_grad()
        for _ in range(passes):
            state = {name: buffer.clone() for name, buffer in model.named_buffers()}
            for part in shares:
                for name, buffer in model.named_buffers():
                    buffer.copy_(state[name])
                (loss_of(model(part)) * len(part) / sum(map(len, shares))).backward()
        optimizer.step()
    return model


def by_loop(case: Case, world: World, passes: int = 1) -> nn.Module:
    """`unisono.parallel` and a loop of one's own, in buckets so small that each model has several."""
    model = unisono.parallel(make(case), world, unisono.BSP(unisono.Exchange(bucket_bytes=100)))
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        if step == 1 and case.change is not None:
            case.change(model)
            optimizer = optimizer_of(model)
        inputs = share(step, world.rank)
        optimizer.zero_grad()
        for _ in range(passes):
            unisono.add_samples(model, len(inputs))
            loss_of(model(inputs)).backward()
        optimizer.step()
    return model


def by_trainer(case: Case, world: World) -> nn.Module:
    model = make(case)
    rule = unisono.BSP(unisono.Exchange(bucket_bytes=100))
    trainer = unisono.Trainer(model, world, rule, optimizer_of(model), loss=loss_of)
    for step in range(STEPS):
        if step == 1 and case.change is not None:
            case.change(model)
            known = {id(parameter) for group in trainer.optimizer.param_groups for parameter in group["params"]}
            new = [
                parameter for parameter in model.parameters() if id(parameter) not in known and parameter.requires_grad
            ]
            if new:
                trainer.optimizer.add_param_group({"params": new})
        inputs = share(step, world.rank)
        trainer.step(inputs, torch.zeros(len(inputs)))
    trainer.wait()
    return model


def alike(model: nn.Module, right: nn.Module) -> None:
    for (name, parameter), expected in zip(model.named_parameters(), right.parameters(), strict=True):
        assert torch.allclose(parameter, expected, rtol=0, atol=1e-12), name
        assert (parameter.grad is None) == (expected.grad is None), name


@pytest.mark.parametrize("way", [by_loop, by_trainer])
@pytest.mark.parametrize("name", CASES)
def test_a_model_is_right_or_refused_by_name(world: World, name: str, way: Callable[[Case, World], nn.Module]) -> None:
    case, group = CASES[name], world.split(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        if not case.refused:
            alike(way(case, group), serial(case, world.size))
        else:
            try:
                model = way(case, group)
            except UsageError as error:
                with pytest.raises(UsageError, match=rf"\b{case.refused}\b"):
                    raise error from None
            else:
                alike(model, serial(case, world.size))
    group.free()


@pytest.mark.parametrize("name", ["plain", "tied", "checkpointed blocks", "LSTM"])
def test_several_backward_passes_before_a_step(group: World, name: str) -> None:
    alike(by_loop(CASES[name], group, passes=2), serial(CASES[name], group.size, passes=2))
