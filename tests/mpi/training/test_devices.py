"""A Trainer whose model is on a device, one for each rank."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono
from unisono.data import Loader, loading
from unisono.data.loading import device_of_rank
from unisono.errors import TensorError, UsageError
from unisono.training.chain import read_chain
from unisono.training.checkpoint.files import load_newest
from unisono.training.recipe import AuditRecipe, Recipe, parse_recipe
from unisono.training.run import TrainOptions, train
from unisono.training.scoring.evaluate import evaluate
from unisono.world import World

STEPS, EACH = 6, 4


@pytest.fixture
def place(device: torch.device, world: World) -> torch.device:
    """This rank's device."""
    return torch.device(device.type, world.rank % torch.accelerator.device_count())


def trained(world: World, where: torch.device, moved: bool) -> tuple[list[torch.Tensor], list[float], float]:
    """The weights after some steps, the losses, and the loss of a test; batches are moved by the Trainer or before."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 6)).double().to(where)
    trainer = unisono.Trainer(model, world, unisono.BSP(), torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    generator = torch.Generator().manual_seed(world.rank)
    batches = [
        (torch.randn(EACH, 5, dtype=torch.float64, generator=generator), torch.arange(EACH)) for _ in range(STEPS)
    ]
    if moved:
        batches = [(inputs.to(where), labels.to(where)) for inputs, labels in batches]
    losses = [trainer.step(*batch) for batch in batches]
    assert isinstance(losses[0], float if where.type == "cpu" else torch.Tensor)
    tested = trainer.evaluate(batches, world.size * STEPS * EACH)
    return (
        [tensor.detach().cpu() for tensor in model.state_dict().values()],
        [float(loss) for loss in losses],
        tested.loss,
    )


@pytest.mark.parametrize("moved", [False, True])
def test_it_trains_as_on_the_host(world: World, place: torch.device, moved: bool) -> None:
    weights, losses, tested = trained(world, torch.device("cpu"), moved)
    own_weights, own_losses, own_tested = trained(world, place, moved)
    torch.testing.assert_close(own_weights, weights, rtol=1e-12, atol=1e-12)
    assert own_losses == pytest.approx(losses, rel=1e-12)
    assert own_tested == pytest.approx(tested, rel=1e-12)


def test_all_ranks_learn_of_a_model_on_two_devices(world: World, place: torch.device) -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 6)).to(place)
    if world.rank == world.size - 1:
        model[1].cpu()
    with pytest.raises(TensorError, match=rf"rank {world.size - 1}: the model: tensors on {place.type}:\d+ and on cpu"):
        unisono.Trainer(model, world, unisono.BSP(), torch.optim.SGD(model.parameters(), 0.1))


def test_a_batch_on_another_device_is_an_error(world: World, place: torch.device) -> None:
    model = nn.Linear(5, 6)
    trainer = unisono.Trainer(model, world, unisono.BSP(), torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(TensorError, match=f"the batch is on {place}, and the model on cpu: move one to the other"):
        trainer.step(torch.ones(EACH, 5, device=place), torch.arange(EACH, device=place))


def recipe_on(device: str, packs: Path, **training: int) -> Recipe:
    """Two epochs of 4 steps, with a checkpoint after every third; the weights of convolutions are images' there."""
    content: dict[str, Any] = {
        "compute": {"device": device, "convolutions": "library"},
        "data": {"pack": str(packs), "augment": "mirror", "threads": 1},
        "model": {"name": "small_convnet", "dtype": "float64"},
        "optimizer": {"learning_rate": 0.2, "policy": "cosine", "weight_decay": 1e-3},
        "rule": {"overlap": "none"},
        "exchange": {"bucket_megabytes": 1},
        "training": {"epochs": 2, "batch": 30, "checkpoint_every": 3, **training},
    }
    return parse_recipe(Recipe, content, "a test")


def metrics_of(run: Path) -> list[list[float]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [[line[key] for key in ("loss", "test_loss", "test_accuracy", "learning_rate")] for line in lines]


def test_a_run_an_evaluation_and_a_resumed_run_are_those_of_the_host(
    group: World, packs: Path, tmp_path: Path, place: torch.device
) -> None:
    """Of a pack, on as many ranks, where each has a device also on its own. Steps are compared that a checkpoint of the
    device, or of the host, has begun."""
    home, on, limit = (
        group.call_on_root(lambda: tmp_path),
        f"{place.type}:0",
        1e-12 if place.type == "pretend" else 1e-9,
    )
    where = {"here": "cpu", "there": on}
    own = {"own": "auto"} if group.size <= torch.accelerator.device_count() else {}
    for name, device in (where | own).items():
        train(recipe_on(device, packs), group, TrainOptions(home / name))

    def stop() -> None:
        for name in where:
            shutil.copytree(home / name, home / f"{name}, resumed")
            shutil.rmtree(max((home / f"{name}, resumed" / "checkpoints").iterdir()))

    group.call_on_root(stop)
    train(recipe_on(on, packs), group, TrainOptions(resume=home / "there, resumed"))
    train(recipe_on(on, packs), group, TrainOptions(resume=home / "here, resumed"))
    right, expected = load_newest(home / "here" / "checkpoints")[0], metrics_of(home / "here")
    for name in (*own, "there", "there, resumed", "here, resumed"):
        checkpoint = load_newest(home / name / "checkpoints")[0]
        assert checkpoint.step == right.step == 8
        torch.testing.assert_close(checkpoint.weights, right.weights, rtol=limit, atol=limit)
        assert metrics_of(home / name) == [pytest.approx(line, rel=limit) for line in expected]
    scores = [evaluate(home / "there", group, None, False, lambda _: None, device)[0] for device in ("cpu", on)]
    assert scores[0].accuracy.top1 == scores[1].accuracy.top1 == expected[-1][2]
    assert scores[1].accuracy.loss == pytest.approx(scores[0].accuracy.loss, rel=limit)
    assert scores[0].confusion is not None
    assert scores[0].confusion.tolist() == scores[1].confusion.tolist()


def test_batches_of_a_loader_are_those_of_the_host(world: World, packs: Path, place: torch.device) -> None:
    def batches_on(device: torch.device) -> list[torch.Tensor]:
        with Loader(packs, world, 16, seed=4, augment="shift", device=device) as loader:
            tensors = [tensor.clone() for _ in range(2) for batch in loader for tensor in batch]
        assert {tensor.device for tensor in tensors} == {device}
        return [tensor.cpu() for tensor in tensors]

    torch.testing.assert_close(batches_on(place), batches_on(torch.device("cpu")), rtol=0, atol=0)


def test_an_audited_run_there_has_the_same_hashes_on_any_ranks(
    group: World, packs: Path, tmp_path: Path, place: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By virtual ranks, of which others compute half again."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which deterministic products of CUDA ask for
    home, alone = group.call_on_root(lambda: tmp_path), group.split(group.rank)
    recipe = recipe_on(f"{place.type}:0", packs, virtual_ranks=3 if group.size < 4 else 5)
    recipe = replace(recipe, audit=AuditRecipe(fraction=0.5, chain=True))
    train(recipe, group, TrainOptions(home / "together"))
    group.call_on_root(lambda: train(recipe, alone, TrainOptions(home / "alone")))
    chains = [read_chain(home / name / "chain.jsonl") for name in ("together", "alone")]
    steps = [[(line["gradients"], line["weights"]) for line in chain if "samples" in line] for chain in chains]
    assert len(steps[0]) == 8
    assert steps[0] == steps[1]
    alone.free()


def test_nodes_with_different_kinds_of_device_are_refused_on_all_ranks(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    if world.size == 1:
        pytest.skip("one node has one kind")
    kind = "cpu" if world.rank == 1 else "cuda"
    monkeypatch.setattr(loading, "choose_device", lambda *_: torch.device(kind))
    with pytest.raises(UsageError, match='device = "auto": rank 0 has cuda, and rank 1 cpu; take nodes with one kind'):
        device_of_rank("auto", world)
