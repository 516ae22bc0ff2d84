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
from unisono.models.convnet import SmallConvnet

def end():
    if os.environ.get("PMI_RANK") == "1":
        pathlib.Path("ending").write_text(str(os.getpid()))
        time.sleep(600)

def network(classes, channels):
    atexit.register(end)
    return SmallConvnet(classes)
"""


@pytest.mark.usefixtures("mpiexec")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, None), (signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_rank_that_dies_while_it_ends_is_named(
    tmp_path: Path, recipe: str, number: signal.Signals, code: int | None
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    own = ["--set", "model.name=slow:network", "--set", f"model.folder={tmp_path}", "--set", "training.epochs=1"]
    command = [sys.executable, "-m", "unisono", "train", recipe, "--ranks", "2", *own]
    with Watched(command, cwd=tmp_path, env=clean_environment()) as watched:
        watched.until((tmp_path / "ending").exists)
        watched.until(lambda: (tmp_path / "ending").read_text() != "")
        os.kill(int((tmp_path / "ending").read_text()), number)
        done = watched.finish()
    assert done.returncode != 0 if code is None else done.returncode == code
    assert "rank 1 of 2" in done.stderr, done.stdout + done.stderr
