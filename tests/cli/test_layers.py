"""The commands `unisono layers` and `unisono bench networks`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.progress import Run
from tests.usage_errors import assert_one_line_error

from unisono.bench import networks
from unisono.bench.networks import CONTENDERS


def test_layers_of_a_network(in_process: Run, tmp_path: Path) -> None:
    options = ("--model=small_convnet", "--batch=4", "--classes=10", "--output=report", "--plan=plan.json")
    done = in_process("layers", *options)
    assert done.returncode == 0, done.stderr
    assert "features.0" in done.stdout
    assert "GFLOP/s of products" in done.stdout
    report = json.loads((tmp_path / "report" / "layers.json").read_text())
    assert {row["layer"] for row in report["rows"]} >= {"features.0", "features.5", "classifier.3"}
    assert (tmp_path / "plan.json").is_file()


def test_layers_of_a_user_defined_network(in_process: Run, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(
        "from torch import nn\ndef wide(classes, channels):\n    return nn.Sequential(nn.Conv2d(channels, 8, 3))\n"
    )
    done = in_process("layers", "--model=nets:wide", "--batch=1", "--size=16")
    assert done.returncode == 0, done.stderr
    assert "Conv2d" in done.stdout


def test_bad_input(in_process: Run) -> None:
    for options, message in (
        (["--model=resnet9000"], "resnet9000"),
        (["--batch=0"], "--batch 0"),
        (["--classes=0"], "--classes 0: both must be at least 1"),
        (["--precision=float8"], "float8"),
        (["--model=vgg16", "--size=8"], "does not accept inputs"),
        (["--model=small_convnet", "--plan=."], "cannot write the plan .: Is a directory"),
    ):
        assert_one_line_error(in_process("layers", *options), message)
    assert_one_line_error(in_process("bench", "networks", "--names", ""), "--names is empty")


def test_networks_beside_stock(in_process: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured is in tests/bench/test_networks.py."""

    def measure(names: list[str], batch: int, steps: int, *_: object) -> list[dict[str, Any]]:
        each: dict[str, Any] = {"seconds": dict.fromkeys(CONTENDERS, [0.5] * steps)}
        return [{"network": name, "batch": batch, "peak_bytes": dict.fromkeys(CONTENDERS, 1), **each} for name in names]

    monkeypatch.setattr(networks, "measure_networks", measure)
    done = in_process("bench", "networks", "--names=small_convnet", "--batch=2", "--steps=1")
    assert done.returncode == 0, done.stderr
    assert "| small_convnet | 2 |" in done.stdout
    (network,) = json.loads((tmp_path / "bench" / "networks.json").read_text())["networks"]
    assert network["batch"] == 2
    assert {name: len(seconds) for name, seconds in network["seconds"].items()} == dict.fromkeys(CONTENDERS, 1)
    assert_one_line_error(in_process("bench", "networks", "--names=nothing"), "nothing")
