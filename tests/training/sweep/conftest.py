"""What the tests of a sweep share: a program in place of `unisono`, and sweeps of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from unisono.training.sweep.grid import Sweep
from unisono.training.sweep.run import plan_given

PROGRAM = """
import json, os, shutil, signal, sys, time, tomllib
from pathlib import Path

assert sys.argv[1] == "train"
if sys.argv[2].startswith("--resume="):
    run = Path(sys.argv[2].removeprefix("--resume="))
    print("resumed")
else:
    run = Path(sys.argv[3].removeprefix("--run="))
    shutil.copy(sys.argv[2], run / "recipe.toml")
Path("group").write_text(str(os.getpgid(0)))
recipe = tomllib.loads((run / "recipe.toml").read_text())
rate, seed = recipe["optimizer"]["learning_rate"], recipe["training"]["seed"]
if rate == 666 and not Path("repaired").exists():
    raise ValueError("no such rate")
if rate == 777 and not Path("repaired").exists():
    before = signal.signal(signal.SIGUSR1, lambda *_: Path("usr1").touch())
    Path("ignored").write_text(str(before == signal.SIG_IGN))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    Path("ready").touch()
    while True:
        time.sleep(0.01)
lines = [{"epoch": epoch, "elapsed": 2.0 * epoch, "seconds": 1.0, "samples_per_second": 100.0 * epoch,
          "test_accuracy": min(1.0, rate + 0.01 * epoch + 0.001 * seed)} for epoch in (1, 2)]
(run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Command that stands for `unisono` in an empty folder: a learning rate of 666 fails, one of 777 waits for SIGTERM.

    Otherwise the accuracy is the rate + 0.01 for each of two epochs + 0.001 x seed. Once there is a file `repaired`,
    all runs end.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    return sys.executable, str(tmp_path / "program.py")


@pytest.fixture
def planned(tmp_path: Path) -> Callable[..., Sweep]:
    """Plans a sweep of the digits in the folder `sweep`."""
    return lambda *changes: plan_given(Path("digits"), changes, None, Path("sweep"))
