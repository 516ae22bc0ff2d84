"""`unisono layers` and `unisono bench networks` as a person meets them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "unisono", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder, check=False)


def test_layers_of_a_network(tmp_path: Path) -> None:
    options = ("--model=small_convnet", "--batch=4", "--classes=10", "--output=report", "--plan=plan.json")
    done = run("layers", *options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "features.0" in done.stdout
    assert "GFLOP/s of products" in done.stdout
    found = json.loads((tmp_path / "report" / "layers.json").read_text())
    assert {row["layer"] for row in found["rows"]} >= {"features.0", "features.5", "classifier.3"}
    assert (tmp_path / "plan.json").is_file()


def test_layers_of_ones_own_network(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(
        "from torch import nn\ndef wide(classes, channels):\n    return nn.Sequential(nn.Conv2d(channels, 8, 3))\n"
    )
    done = run("layers", "--model=nets:wide", "--batch=1", "--size=16", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Conv2d" in done.stdout


def test_what_is_asked_wrongly(tmp_path: Path) -> None:
    for options, said in (
        (["--model=resnet9000"], "resnet9000"),
        (["--batch=0"], "--batch 0"),
        (["--precision=float8"], "float8"),
        (["--model=vgg16", "--size=8"], "cannot be shown inputs"),
        (["--model=small_convnet", "--plan=."], "cannot write the plan .: Is a directory"),
    ):
        done = run("layers", *options, folder=tmp_path)
        assert done.returncode == 2
        assert said in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_networks_beside_stock(tmp_path: Path) -> None:
    done = run("bench", "networks", "--names=small_convnet", "--batch=2", "--steps=1", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "| small_convnet | 2 |" in done.stdout
    assert json.loads((tmp_path / "bench" / "networks.json").read_text())["networks"][0]["batch"] == 2
    assert run("bench", "networks", "--names=nothing", folder=tmp_path).returncode == 2
