"""Any number of ranks with one global batch follows the same loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import pytest
import torch
from torch import nn

import unisono
from unisono.data.builtin import in_memory_feed, load_digits
from unisono.data.order import permutation, share, steps_of
from unisono.models.convnet import small_convnet
from unisono.optimizers import OPTIMIZERS, make_optimizer
from unisono.training.accuracy import Accuracy, accuracy_of, classification_loss, count
from unisono.world import World

Network = Callable[[int], nn.Module]

STEPS, BATCH = 100, 26


def smooth_convnet(classes: int) -> nn.Module:
    """A network without kinks. With ReLU or a maximum, float32 rounding sooner or later picks another branch, and from
    there plain PyTorch differs from its own float64 by more than any number of ranks does (docs/sharp_bits.md)."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(1024, classes),
    )


def make(dtype: torch.dtype, network: Network = small_convnet) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = network(10).to(dtype)
    return model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)


def batches(rank: int, ranks: int) -> Iterator[torch.Tensor]:
    """The shares of one rank."""
    samples = len(load_digits().train)
    steps = steps_of(samples, BATCH)
    for step in range(STEPS):
        order = permutation(samples, 0, step // steps)
        yield torch.from_numpy(share(order, BATCH, step % steps, rank, ranks))


def serial_losses(dtype: torch.dtype, network: Network) -> list[float]:
    """Plain PyTorch on whole batches."""
    data, (model, optimizer) = load_digits().train, make(dtype, network)
    losses = []
    for rows in batches(0, 1):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(data.inputs[rows].to(dtype)), data.labels[rows])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def parallel_run(world: World, dtype: torch.dtype, network: Network, steps: int = STEPS) -> tuple[list[float], bytes]:
    data, (model, optimizer) = load_digits().train, make(dtype, network)
    trainer = unisono.Trainer(model, world, unisono.BSP(), optimizer)
    losses, seen = torch.zeros(steps, dtype=torch.float64), torch.zeros(steps, dtype=torch.float64)
    for step, rows in enumerate(islice(batches(world.rank, world.size), steps)):
        losses[step] = trainer.step(data.inputs[rows].to(dtype), data.labels[rows])
        seen[step] = len(rows)
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return (world.allreduce(losses) / world.allreduce(seen)).tolist(), weights


@pytest.mark.parametrize(
    ("dtype", "network", "tolerance"),
    [(torch.float64, small_convnet, 1e-9), (torch.float32, smooth_convnet, 1e-3)],
)
def test_the_same_loss_as_serial_for_100_steps(
    group: World, dtype: torch.dtype, network: Network, tolerance: float
) -> None:
    losses, _ = parallel_run(group, dtype, network)
    expected = torch.tensor(serial_losses(dtype, network) if group.rank == 0 else [0.0] * STEPS, dtype=torch.float64)
    reference = group.broadcast(expected, 0).tolist()
    assert reference[-1] < reference[0] / 2, "a network that learns nothing agrees with anything"
    worst = max(abs(loss - expected) / expected for loss, expected in zip(losses, reference, strict=True))
    if group.rank == 0:
        print(f"\n{group.size} ranks, {dtype}, {network.__name__}: largest relative difference {worst:.1e}")
    assert worst <= tolerance


def test_each_of_several_trainers_clips_by_its_own_norm(group: World) -> None:
    data, changes = load_digits().train, list[float]()
    model, optimizer = make(torch.float32)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    clips = [unisono.Trainer(model, group, unisono.BSP(), optimizer, clip=clip) for clip in (1e-9, None)]
    for trainer in (*clips, clips[0]):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.state.clear()  # of momentum
        trainer.step(data.inputs[:8], data.labels[:8])
        trainer.wait()
        pairs = zip(model.parameters(), before, strict=True)
        changes.append(max(float((now - then).abs().max()) for now, then in pairs))
    assert changes[0] < 1e-6 < changes[1]
    assert changes[2] < 1e-6


def test_two_runs_end_with_identical_bits_on_all_ranks(group: World) -> None:
    first = parallel_run(group, torch.float32, small_convnet, 20)
    assert first == parallel_run(group, torch.float32, small_convnet, 20)
    assert len(set(group.all_gather_object(first[1]))) == 1


def assert_alike(actual: Accuracy, expected: Accuracy) -> None:
    """Alike but for the order in which losses are added."""
    assert (actual.top1, actual.top5) == (expected.top1, expected.top5)
    assert actual.loss == pytest.approx(expected.loss, rel=1e-6)


def test_evaluation_sees_each_sample_once(group: World) -> None:
    data, (model, optimizer) = load_digits(), make(torch.float32)
    trainer = unisono.Trainer(model, group, unisono.BSP(), optimizer)
    with torch.no_grad():
        expected = accuracy_of(count(model(data.test.inputs), data.test.labels), len(data.test))
    feed = in_memory_feed(data, group, 0)
    for batch in (7, 1000):
        assert_alike(trainer.evaluate(feed.test_batches(batch), feed.test_samples), expected)


def test_a_rank_without_batches_takes_part_in_evaluation(group: World) -> None:
    data, (model, optimizer) = load_digits().test, make(torch.float32)
    trainer = unisono.Trainer(model, group, unisono.BSP(), optimizer)
    with torch.no_grad():
        expected = accuracy_of(count(model(data.inputs[:9]), data.labels[:9]), 9)
    batches = [(data.inputs[:9], data.labels[:9])] if group.rank == 0 else []
    assert_alike(trainer.evaluate(batches, 9), expected)
    assert expected.top5 is not None, "there are ten classes"


def test_an_empty_share_takes_part(group: World) -> None:
    data, (model, optimizer) = load_digits().train, make(torch.float32)
    trainer = unisono.Trainer(model, group, unisono.BSP(), optimizer)
    rows = torch.arange(4 if group.rank == 0 else 0)
    trainer.step(data.inputs[rows], data.labels[rows])
    weights = model.classifier[1].weight.detach().numpy().tobytes()
    assert len(set(group.all_gather_object(weights))) == 1
    assert trainer.recorder.split()["computing"] > 0


@pytest.mark.parametrize("part", ["whole", "in place", "layer"])
def test_the_weights_of_a_compiled_model_are_up_to_date_after_a_step(group: World, part: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Linear(1024, 10))
    if part == "whole":
        model = torch.compile(model, backend="eager")
    elif part == "in place":
        model.compile(backend="eager")
    else:
        model[0].compile(backend="eager")
    kept = list(model.parameters())
    trainer = unisono.Trainer(model, group, unisono.BSP(), torch.optim.Adam(kept, 0.01))
    for _ in range(4):
        trainer.step(torch.ones(2, 64), torch.zeros(2, dtype=torch.int64))
        early = [parameter.detach().clone() for parameter in kept]
        trainer.wait()
        assert all(map(torch.equal, early, kept))


def test_frozen_batch_norms_stay_frozen(group: World) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10), nn.BatchNorm1d(10)).eval()
    feed = in_memory_feed(load_digits(), group, 0)
    trainer = unisono.Trainer(model, group, unisono.BSP(), torch.optim.SGD(model.parameters(), 0.1))
    frozen, free = model[2], model[3]
    for step in range(3):
        trainer.step(torch.ones(4, 64) * group.rank, torch.zeros(4, dtype=torch.int64))
        assert model.training and free.training
        if step == 0:  # it has switched all of a model in evaluation mode
            assert frozen.eval().num_batches_tracked == 1
        trainer.evaluate(feed.test_batches(1000), feed.test_samples)
    assert (int(frozen.num_batches_tracked), int(free.num_batches_tracked)) == (1, 3)


class Aided(nn.Module):
    """A network with an auxiliary classifier, in training."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.own, self.auxiliary = nn.Linear(64, 32), nn.Linear(32, 10), nn.Linear(32, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        inner = torch.tanh(self.first(inputs.flatten(1)))
        return (self.own(inner), self.auxiliary(inner)) if self.training else self.own(inner)


@pytest.mark.parametrize(("name", "nesterov"), [*((name, False) for name in OPTIMIZERS), ("sgd", True)])
def test_every_optimizer_and_auxiliary_classifiers_follow_the_serial_run(
    group: World, name: str, nesterov: bool
) -> None:
    data, rate = load_digits(), {"sgd": 0.1, "adamw": 0.01, "lars": 5.0, "lamb": 0.01}[name]

    def make_both() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Aided().double()
        return model, make_optimizer(name, model, rate, 0.9, 1e-3, nesterov)

    (plain, its), (model, optimizer) = make_both(), make_both()
    trainer = unisono.Trainer(model, group, unisono.BSP(), optimizer)
    losses = []
    for mine, rows in zip(batches(group.rank, group.size), batches(0, 1), strict=True):
        trainer.step(data.train.inputs[mine].double(), data.train.labels[mine])
        its.zero_grad()
        loss = classification_loss(plain(data.train.inputs[rows].double()), data.train.labels[rows])
        loss.backward()
        its.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2, "a network that learns nothing agrees with anything"
    trainer.wait()
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-9, atol=1e-10)
