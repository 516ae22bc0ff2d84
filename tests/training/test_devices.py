"""A recipe on a device: the numbers of a run on the processor, whatever the device does late."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from unisono.device import check_not_captured, module_of
from unisono.errors import UsageError
from unisono.training.accuracy import LossSum
from unisono.training.checkpoint.files import load_newest

InProcess = Callable[..., subprocess.CompletedProcess[str]]

NETS = """
from torch import nn
def smooth(classes, channels):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, classes))
def dropping(classes, channels):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Dropout(0.5), nn.Linear(12, classes))
"""


@pytest.fixture
def trained(in_process: InProcess, tmp_path: Path) -> Callable[..., str]:
    """Trains a network of five steps an epoch, in float64, on one rank. Returns what is printed."""
    (tmp_path / "device_nets.py").write_text(NETS)

    def train(run: str, network: str, *changes: str) -> str:
        given = [
            "training.batch=300",
            "training.epochs=1",
            "model.dtype=float64",
            f"model.name=device_nets:{network}",
            *changes,
        ]
        sets = [word for change in given for word in ("--set", change)]
        done = in_process("train", "digits", "--ranks", "1", "--run", run, *sets)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return train


def metrics_of(run: Path) -> list[tuple[float, ...]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [tuple(line[key] for key in ("loss", "test_loss", "test_accuracy", "learning_rate")) for line in lines]


def weights_of(run: Path) -> dict[str, Any]:
    weights = load_newest(run / "checkpoints")[0].weights
    assert {weight.device.type for weight in weights.values()} == {"cpu"}
    return weights


def test_a_run_has_the_numbers_of_one_on_the_processor(
    trained: Callable[..., str], in_process: InProcess, tmp_path: Path, device: torch.device
) -> None:
    printed = trained("here", "smooth")
    assert f"{device.type} (" in printed
    assert 'is not used: compute.device = "auto" takes it' in printed
    printed = trained("there", "smooth", f"compute.device={device.type}")
    assert f"products in float64, rank 0 on {device} (" in printed
    assert "; convolutions are not autotuned there\n" in printed
    here, there = (tmp_path / run for run in ("here", "there"))
    assert metrics_of(there) == [pytest.approx(line, rel=1e-12) for line in metrics_of(here)]
    torch.testing.assert_close(weights_of(there), weights_of(here), rtol=1e-12, atol=1e-12)

    scores = {}
    for run, name in ((here, "cpu"), (there, "auto"), (there, "cpu")):
        done = in_process("evaluate", str(run), "--device", name)
        assert done.returncode == 0, done.stderr
        scores[run, name] = json.loads((run / "evaluation.json").read_text())
    assert len({score["top1"] for score in scores.values()}) == 1
    assert [score["confusion"] for score in scores.values()] == [scores[here, "cpu"]["confusion"]] * 3
    assert [score["loss"] for score in scores.values()] == [pytest.approx(scores[here, "cpu"]["loss"], rel=1e-12)] * 3

    Image.new("L", (8, 8), 90).save(tmp_path / "grey.png")
    predicted = [json.loads(in_process("predict", str(run), "grey.png", "--json").stdout)[0] for run in (here, there)]
    expected, actual = ({row["class"]: row["probability"] for row in each["classes"]} for each in predicted)
    assert list(actual) == list(expected)
    assert actual == pytest.approx(expected, rel=1e-12)


def test_a_resumed_run_draws_the_same_dropouts_on_it(
    trained: Callable[..., str], in_process: InProcess, tmp_path: Path, device: torch.device
) -> None:
    on = f"compute.device={device}"
    trained("whole", "dropping", on, "training.epochs=2")
    trained("parts", "dropping", on)
    done = in_process("train", "--resume", "parts", "--set", "training.epochs=2")
    assert done.returncode == 0, done.stderr
    assert metrics_of(tmp_path / "parts") == metrics_of(tmp_path / "whole")
    torch.testing.assert_close(weights_of(tmp_path / "parts"), weights_of(tmp_path / "whole"), rtol=0, atol=0)
    done = in_process("train", "--resume", "parts", "--set", "training.epochs=3", "--set", "compute.device=cpu")
    assert done.returncode == 0, done.stderr
    assert len(metrics_of(tmp_path / "parts")) == 3


def test_products_are_rounded_there(trained: Callable[..., str], device: torch.device) -> None:
    on = f"compute.device={device}", "model.dtype=float32"
    assert "products in bfloat16, rank 0 on" in trained("auto", "smooth", *on)
    assert "products in float32, rank 0 on" in trained("exact", "smooth", *on, "compute.precision=float32")


def test_a_device_that_is_not_there_is_named(in_process: InProcess, device: torch.device) -> None:
    for name, message in (
        ("Nothing at all", 'there are "auto", "cpu" and the kinds that PyTorch has'),
        ("hpu", f"PyTorch finds {device.type} alone here"),
        (f"{device.type}:99", "numbered from 0"),
    ):
        done = in_process("train", "digits", "--ranks", "1", "--set", f"compute.device={name}")
        assert done.returncode == 2
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_step_is_not_captured_as_a_graph(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    check_not_captured(device)
    monkeypatch.setattr(module_of(device), "is_current_stream_capturing", lambda: True, raising=False)
    check_not_captured(torch.device("cpu"))
    with pytest.raises(UsageError, match="capture the forward pass alone"):
        check_not_captured(device)


def test_losses_of_a_device_are_read_a_step_later(device: torch.device) -> None:
    losses, numbers = LossSum(0.5), torch.randn(6, dtype=torch.float64)
    for step, loss in enumerate(numbers.to(device)):
        losses.add(2 * loss, 2)
        assert losses.last == (float(2 * numbers[step - 1]) / 2 if step else None)
    expected = 0.5
    for loss in numbers.tolist():
        expected += 2 * loss
    assert losses.total == expected
    assert losses.last == numbers[-1]
    losses.add(0.0, 0)
    assert (losses.total, losses.last) == (expected, None)
