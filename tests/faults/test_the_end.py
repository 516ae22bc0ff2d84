"""A rank that dies while it ends, all being saved, is named as well."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from tests.conftest import clean_environment
from tests.progress import Watched

SLOW = """
import atexit, os, pathlib, time
from torch import nn

def end():
    if os.environ.get("PMI_RANK") == "1":
        pathlib.Path("ending").write_text(str(os.getpid()))
        while not pathlib.Path("go").exists():
            time.sleep(0.02)

def network(classes, channels):
    atexit.register(end)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
"""

LEAN = ["--set", "rule.overlap=chain", "--set", "exchange.bucket_megabytes=1", "--set", "training.batch=480"]
"""Nothing is searched, and an epoch has 3 steps."""


@pytest.mark.usefixtures("mpiexec")
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGKILL, None), (signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_rank_that_dies_while_it_ends_is_named(
    tmp_path: Path, recipe: str, signum: signal.Signals, code: int | None
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    own = ["--set", "model.name=slow:network", "--set", f"model.folder={tmp_path}", "--set", "training.epochs=1", *LEAN]
    command = [sys.executable, "-m", "unisono", "train", recipe, "--ranks", "2", *own]
    with Watched(command, cwd=tmp_path, env=clean_environment()) as watched:
        watched.until((tmp_path / "ending").exists)
        watched.until(lambda: (tmp_path / "ending").read_text() != "")
        os.kill(int((tmp_path / "ending").read_text()), signum)
        done = watched.finish()
    assert done.returncode != 0 if code is None else done.returncode == code
    assert "rank 1 of 2" in done.stderr, done.stdout + done.stderr


@pytest.mark.usefixtures("mpiexec")
def test_a_signal_that_comes_late_to_a_rank_changes_nothing(tmp_path: Path, recipe: str) -> None:
    """Batch systems signal ranks one after another: some have saved and are ending by then."""
    (tmp_path / "slow.py").write_text(SLOW)
    own = ["--set", "model.name=slow:network", "--set", f"model.folder={tmp_path}", "--set", "training.epochs=5000"]
    command = [sys.executable, "-m", "unisono", "train", recipe, "--ranks", "2", "--run", "run", *own, *LEAN]
    with Watched(command, cwd=tmp_path, env=clean_environment()) as watched:
        watched.until((tmp_path / "run" / "metrics.jsonl").exists)
        watched.process.send_signal(signal.SIGTERM)
        watched.until((tmp_path / "ending").exists)
        watched.until(lambda: (tmp_path / "ending").read_text() != "")
        os.kill(int((tmp_path / "ending").read_text()), signal.SIGTERM)
        (tmp_path / "go").touch()
        done = watched.finish()
    assert done.returncode == 143, done.stdout + done.stderr
    assert "all ranks end" not in done.stderr
