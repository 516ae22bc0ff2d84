"""Workers and servers on real ranks: the final centre is what one process computes from the event log."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from unisono.asynchronous.event_log import read_events, read_order
from unisono.data.builtin import in_memory_feed, load_digits
from unisono.data.order import own_numbers, worker_order
from unisono.rules import EASGD, Exchange
from unisono.schedules.pieces import bounds
from unisono.step.layout import Bucket, Layout
from unisono.testing import Batch, InProcessReplica, serve_in_order
from unisono.training import run_directory
from unisono.training.checkpoint.files import load_newest
from unisono.training.cut import compare, worker_folder
from unisono.training.recipe import ModelRecipe, OptimizerRecipe, Recipe, TrainingRecipe
from unisono.training.run import Run, TrainOptions
from unisono.training.trainer import Trainer
from unisono.training.worker import WorkerPlayer
from unisono.world import World

BATCH, RATE = 144, 0.05
RECIPE = Recipe(
    model=ModelRecipe(dtype="float64"),
    optimizer=OptimizerRecipe(learning_rate=RATE),
    training=TrainingRecipe(batch=BATCH, seed=3),
)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.Tanh(), nn.Linear(20, 10)).double()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), RATE, momentum=0.9)


def trained(
    world: World, rule: EASGD, home: Path, replays: Path | None = None, device: str = "cpu", epochs: int = 2
) -> int:
    return train(network().to(device), world, rule, home, replays, epochs)


def train(model: nn.Module, world: World, rule: EASGD, home: Path, replays: Path | None = None, epochs: int = 2) -> int:
    trainer = Trainer(model, world, rule, optimizer_of(model))
    feed = in_memory_feed(load_digits(), world, RECIPE.training.seed)
    options, recipe = TrainOptions(replay=replays), replace(RECIPE, training=replace(RECIPE.training, epochs=epochs))
    run = WorkerPlayer(Run(recipe, world, feed, trainer, home, time.perf_counter(), options), rule)
    run.begin(None)
    code = run.train()
    world.barrier()
    return code


def drawn(samples: int, worker: int, epoch: int, _: int) -> np.ndarray:
    """Return the order of a worker's epoch."""
    return worker_order(np.arange(samples), RECIPE.training.seed, worker, epoch)


def serially(rule: EASGD, home: Path, workers: int, ranks: int) -> tuple[torch.Tensor, list[int]]:
    """Return the final centre, flat, from the log of a run with one server, and the steps of each worker."""
    order, data, nets = read_order(home, 0), load_digits().train, [network() for _ in range(workers)]
    steps = [0] * workers
    for event in read_events(home, 0):
        steps[event["worker"]] = event["sent"] + 1
    lengths = [parameter.numel() for parameter in nets[0].parameters()]
    layout = Layout(ranks, len(lengths), (Bucket(8 * sum(lengths), tuple(range(len(lengths)))),))
    replicas = []
    for worker, net in enumerate(nets):
        first, last = bounds(BATCH, workers, worker)
        draw = partial(drawn, len(data), worker)
        numbers = own_numbers(draw, len(data), last - first, 0)
        rows = [torch.from_numpy(next(numbers)[1]) for _ in range(steps[worker])]
        batches = [Batch(data.inputs[row].double(), data.labels[row]) for row in rows]
        loss = nn.functional.cross_entropy
        replicas.append(InProcessReplica(net, optimizer_of(net), loss, layout, batches))
    (centre,) = serve_in_order(rule, replicas, [order], steps)
    return centre.flats[1], steps


@pytest.mark.parametrize("server", ["rank", "thread"])
@pytest.mark.parametrize(("period", "overlap"), [(1, "chain"), (2, "chain"), (1, "none")])
def test_a_run_is_what_one_process_plays_from_its_log(
    group: World, tmp_path_factory: pytest.TempPathFactory, server: str, period: int, overlap: str
) -> None:
    if server == "rank" and group.size == 1:
        return
    rule = EASGD(Exchange(bucket_bytes=4000), overlap, server=server, period=period, alpha=0.3)
    home = group.call_on_root(lambda: tmp_path_factory.mktemp("run"))
    assert trained(group, rule, home) == 0
    workers = rule.seats(group.size).workers
    if group.rank == 0:
        checkpoint, _ = load_newest(home / run_directory.CHECKPOINTS)
        expected, steps = serially(rule, home, workers, group.size)
        flat = torch.cat([weight.reshape(-1) for weight in checkpoint.weights.values()])
        torch.testing.assert_close(flat, expected, rtol=0, atol=1e-12)
        assert sum(steps) * (BATCH // workers) >= 2 * len(load_digits().train) - workers * period * BATCH
        assert len(run_directory.read_metrics(home)) == 2
    group.barrier()


@pytest.mark.parametrize("server", ["rank", "thread"])
def test_workers_whose_models_are_on_a_device(
    group: World, tmp_path_factory: pytest.TempPathFactory, device: torch.device, server: str
) -> None:
    if server == "rank" and group.size == 1:
        return
    rule = EASGD(Exchange(bucket_bytes=4000), server=server, period=1, alpha=0.3)
    home = group.call_on_root(lambda: tmp_path_factory.mktemp("run"))
    assert trained(group, rule, home, device=str(device), epochs=1) == 0
    if group.rank == 0:
        checkpoint, _ = load_newest(home / run_directory.CHECKPOINTS)
        expected, _ = serially(rule, home, rule.seats(group.size).workers, group.size)
        flat = torch.cat([weight.reshape(-1) for weight in checkpoint.weights.values()])
        torch.testing.assert_close(flat, expected, rtol=0, atol=1e-12)
    group.barrier()


def test_a_replay_with_two_servers_a_wire_and_a_bound(group: World, tmp_path_factory: pytest.TempPathFactory) -> None:
    if group.size == 1:
        return
    rule = EASGD(Exchange(wire="bfloat16"), server="thread", servers=2, staleness=2 * group.size)
    homes = group.call_on_root(lambda: [tmp_path_factory.mktemp(name) for name in ("run", "replay")])
    assert trained(group, rule, homes[0]) == 0
    assert trained(group, rule, homes[1], replays=homes[0]) == 0
    if group.rank == 0:
        assert compare(homes[1], homes[0]) is None
        for server in range(2):
            assert read_order(homes[1], server) == read_order(homes[0], server)
            assert max(event["stale"] for event in read_events(homes[0], server)) <= 2 * group.size
    group.barrier()


class Counting(nn.Module):
    """Counts its calls in an extra state."""

    calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return inputs

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def test_a_snapshot_has_the_extra_state_of_its_step(group: World, tmp_path_factory: pytest.TempPathFactory) -> None:
    homes = group.call_on_root(lambda: [tmp_path_factory.mktemp(name) for name in ("run", "replay")])
    for home, replays in (homes[0], None), (homes[1], homes[0]):
        assert train(nn.Sequential(Counting(), network()), group, EASGD(server="thread"), home, replays) == 0
    snapshot, _ = load_newest(worker_folder(homes[0], group.rank))
    assert snapshot.weights["0._extra_state"] == {"calls": snapshot.progress["step"]}
    assert snapshot.progress["step"] > 0
    assert compare(homes[1], homes[0]) is None
    group.barrier()
