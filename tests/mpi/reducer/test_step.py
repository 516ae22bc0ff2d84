"""The step as a graph: whatever goes on beside what, the weights are those of the plain step."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable

import pytest
import torch
from tests.mpi.reducer.shares import SMALL, batches
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

import unisono
from unisono.engine import Handle, OperationSpan
from unisono.errors import UsageError
from unisono.models.convnet import small_convnet
from unisono.reducer import reducer_of
from unisono.training.trainer import Trainer
from unisono.world import World


class Branches(nn.Module):
    """Its branches are computed in an order that is drawn anew in each step, on each rank."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(1, size, bias=False) for size in (3, 700, 1, 50, 2000, 8, 300))
        self.draw = draw

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        order = self.draw.sample(range(len(self.branches)), len(self.branches))
        return torch.stack([self.branches[branch](inputs).sum() for branch in order]).sum()


@pytest.mark.parametrize("overlap", ["auto", "chain", "concurrent", "funnel"])
def test_gradients_in_random_order_on_each_rank(group: World, overlap: str) -> None:
    steps = 300 if overlap == "auto" else 60
    model = Branches(random.Random(group.rank))
    rule = unisono.BSP(unisono.Exchange(bucket_bytes=None if overlap == "auto" else 1024), overlap)
    trainer = unisono.Trainer(
        model, group, rule, torch.optim.SGD(model.parameters(), 1.0), loss=lambda scores, _: scores
    )
    before = model.branches[4].weight.detach().clone()
    total = 0.0
    for step in range(steps):
        mean = sum(rank + step % 7 for rank in range(group.size)) / group.size
        trainer.step(torch.full((1, 1), float(group.rank + step % 7)), torch.zeros(1))
        total += mean
        if step % 50 == 0:
            trainer.wait()
            assert all(
                torch.allclose(branch.weight.grad, torch.full_like(branch.weight, mean)) for branch in model.branches
            )
    trainer.wait()
    assert torch.allclose(model.branches[4].weight, before - total, rtol=1e-4)


Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, 0.01),
    "AdamW": lambda parameters: torch.optim.AdamW(
        [{"params": parameters[:2], "lr": 0.02}, {"params": parameters[2:], "weight_decay": 0.1}], 0.01
    ),
    "Rprop": lambda parameters: torch.optim.Rprop(parameters, 0.01),
    "clipped": lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_with_a_schedule_follows_the_serial_run(group: World, name: str) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()
        optimizer = OPTIMIZERS[name](list(model.parameters()))
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)

    clip = 0.1 if name == "clipped" else None
    model, optimizer, schedule = make()
    trainer = unisono.Trainer(model, group, unisono.BSP(unisono.Exchange(bucket_bytes=3000)), optimizer, clip=clip)
    for inputs, labels in batches(group, 12):
        trainer.step(inputs.double(), labels)
        schedule.step()
    serial, plain, schedule = make()
    for inputs, labels in batches(group.split(group.rank), 12):
        plain.zero_grad()
        nn.functional.cross_entropy(serial(inputs.double()), labels).backward()
        if clip:
            nn.utils.clip_grad_norm_(serial.parameters(), clip)
        plain.step()
        schedule.step()
    for parameter, expected in zip(model.parameters(), serial.parameters(), strict=True):
        assert torch.allclose(parameter, expected, rtol=0, atol=1e-9)


def test_gradients_accumulate_without_an_exchange(group: World) -> None:
    torch.manual_seed(0)
    model = unisono.parallel(nn.Linear(3, 2), group)
    for _ in range(8):
        model.zero_grad()
        with unisono.no_sync(model):
            for _ in range(3):
                model(torch.full((2, 3), float(group.rank))).sum().backward()
            assert model.bias.grad.tolist() == [6.0, 6.0]
        model(torch.full((2, 3), float(group.rank))).sum().backward()
        assert torch.allclose(model.bias.grad, torch.full((2,), 8.0))
        mean = (group.size - 1) / 2
        assert torch.allclose(model.weight.grad, torch.full((2, 3), 8.0 * mean))
    with pytest.raises(UsageError, match="not parallel"):
        unisono.no_sync(nn.Linear(1, 1))


def test_mixed_precision_and_channels_last(group: World) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2))
    model = model.to(memory_format=torch.channels_last)
    unisono.parallel(model, group)
    inputs = torch.full((2, 3, 8, 8), float(group.rank)).to(memory_format=torch.channels_last)
    for _ in range(7):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            model(inputs).sum().backward()
        assert model[0].weight.grad.dtype is torch.float32
        assert model[0].weight.grad.stride() == model[0].weight.stride()
        assert torch.allclose(model[3].bias.grad, torch.full((2,), 2.0))


def test_the_result_is_stored_for_a_resumed_run(group: World) -> None:
    trainers = [
        unisono.Trainer(model, group, unisono.BSP(), torch.optim.SGD(model.parameters(), 0.01))
        for model in (small_convnet(10), small_convnet(10))
    ]
    for inputs, labels in batches(group, 60):
        trainers[0].step(inputs, labels)
    trainers[0].wait()
    state = trainers[0].reducer.programs.tuning.state()
    assert state is not None
    trainers[1].reducer.restore(json.loads(json.dumps(state)))
    assert [*trainers[1].reducer.programs.tuning.setting[:2]] == state["setting"][:2], "not that of a rival's trial"
    assert trainers[1].reducer.programs.tuning.state() == state


def test_a_failure_in_another_thread_is_raised(group: World) -> None:
    class Broken(torch.optim.SGD):
        def step(self, closure: None = None) -> None:
            raise ValueError("no update today")

    model = nn.Linear(2, 1)
    trainer = unisono.Trainer(
        model, group, unisono.BSP(), Broken(model.parameters(), 0.1), loss=lambda scores, _: scores.sum()
    )
    with pytest.raises(unisono.UnisonoError, match=r"update [01] failed: ValueError: no update today"):
        trainer.step(torch.ones(2, 2), torch.zeros(2))


def test_reading_a_model_waits_for_its_updates(group: World) -> None:
    torch.manual_seed(0)
    model = nn.LSTM(3, 5, num_layers=2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = unisono.Trainer(
        model, group, unisono.BSP(SMALL, "chain"), optimizer, loss=lambda scores, _: scores[0].square().mean()
    )
    for _ in range(6):
        trainer.step(torch.randn(4, 2, 3), torch.zeros(4))
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        trainer.wait()
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert reducer_of(model) is trainer.reducer


def test_clearing_gradients_between_steps_changes_nothing(group: World) -> None:
    weights = []
    for clears in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        trainer = unisono.Trainer(model, group, unisono.BSP(SMALL, "chain"), optimizer)
        for inputs, labels in batches(group, 20):
            if clears:
                optimizer.zero_grad(set_to_none=False)
            trainer.step(inputs, labels)
            if clears:
                optimizer.zero_grad()
        weights.append(b"".join(value.numpy().tobytes() for value in model.state_dict().values()))
    assert weights[0] == weights[1]


def test_a_backward_pass_outside_the_trainer_updates_nothing(group: World) -> None:
    model = nn.Linear(3, 1)
    trainer = unisono.Trainer(
        model, group, unisono.BSP(), torch.optim.SGD(model.parameters(), 0.1), loss=lambda scores, _: scores.sum()
    )
    for _ in range(8):
        trainer.step(torch.full((2, 3), float(group.rank)), torch.zeros(2))
        weights = model.weight.detach().clone()
        model.zero_grad()
        model(torch.full((2, 3), float(group.rank))).sum().backward()
        assert torch.allclose(model.weight.grad, torch.full((1, 3), (group.size - 1.0)))
        assert torch.equal(model.weight, weights)


def test_unsupported_trainer_options_are_refused(group: World) -> None:
    model, elsewhere = nn.Linear(3, 1), nn.Parameter(torch.ones(5))
    optimizer = torch.optim.SGD([*model.parameters(), elsewhere], 0.1)
    trainer = unisono.Trainer(model, group, unisono.BSP(), optimizer, loss=lambda scores, _: scores.sum())
    with pytest.raises(UsageError, match=r"a parameter of shape \(5,\) that is not the model's"):
        trainer.step(torch.ones(2, 3), torch.zeros(2))
    elsewhere.requires_grad_(requires_grad=False)
    trainer.step(torch.ones(2, 3), torch.zeros(2))
    with unisono.no_sync(model):
        with pytest.raises(UsageError, match="does not accumulate"):
            trainer.step(torch.ones(2, 3), torch.zeros(2))
        model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(UsageError, match="does not accumulate"):
        trainer.step(torch.ones(2, 3), torch.zeros(2))


def test_checkpointed_blocks_are_averaged_once(group: World) -> None:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    model = nn.Sequential(blocks, nn.Linear(4, 1))
    model[1].requires_grad_(requires_grad=False)
    trainer = unisono.Trainer(
        model, group, unisono.BSP(SMALL, "chain"), torch.optim.SGD(model.parameters(), 0.1), loss=lambda x, _: x.mean()
    )
    plain = copy.deepcopy(model)
    blocks.forward = lambda given: checkpoint_sequential(blocks, 3, given, use_reentrant=True)
    for _ in range(3):
        inputs = torch.ones(2, 4, requires_grad=True)
        trainer.step(inputs, torch.zeros(2))
        plain.zero_grad()
        plain(torch.ones(2, 4)).mean().backward()
        with torch.no_grad():
            for parameter in plain[0].parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
    assert all(
        torch.allclose(parameter, expected)
        for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True)
    )


@pytest.mark.parametrize("pending", [False, True])
def test_a_wait_for_weights_is_reported_where_they_were_not_up_to_date(
    group: World, monkeypatch: pytest.MonkeyPatch, pending: bool
) -> None:
    wait = Handle.wait

    def waits(handle: Handle, seconds: float | None = None) -> bool:
        return wait(handle) and not (pending and seconds == 0)

    monkeypatch.setattr(Handle, "wait", waits)
    model, spans = nn.Linear(4, 2), list[OperationSpan]()
    trainer = Trainer(model, group, unisono.BSP(), torch.optim.SGD(model.parameters(), 0.1))
    trainer.reducer.observe = spans.append
    for _ in range(2):
        trainer.step(torch.ones(3, 4), torch.zeros(3, dtype=torch.int64))
    trainer.wait()
    kinds = [(span.kind, span.thread) for span in spans if span.name == "wait for weights"]
    assert kinds == [("waiting", "MainThread")] * (2 * pending)
    trainer.reducer.release()


def test_a_pass_beside_the_main_thread_has_its_number_of_threads(world: World) -> None:
    """The thread of such passes has a number of its own; products, and so bits, depend on it."""
    model, before, counts = nn.Linear(3, 2), torch.get_num_threads(), list[int]()
    trainer = Trainer(model, world, unisono.BSP(overlap="funnel"), torch.optim.SGD(model.parameters(), 0.1))
    model.weight.register_hook(lambda _: counts.append(torch.get_num_threads()))
    try:
        for threads in (2, 1, 3):
            torch.set_num_threads(threads)
            trainer.step(torch.ones(1, 3), torch.zeros(1, dtype=torch.int64))
        trainer.wait()
    finally:
        torch.set_num_threads(before)
    assert counts == [2, 1, 3]
