"""Programs of Accelerate, Hugging Face's Trainer and Lightning run under `unisono run`, as the pages about them show.

`make examples` installs these libraries; without them the tests are skipped.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
NEEDS = {
    "train_accelerate.py": "accelerate",
    "train_trainer.py": "transformers",
    "train_lightning.py": "lightning",
}
FED = {
    "train_accelerate_pack.py": "unisono 2 steps 16",
    "train_trainer_pack.py": "unisono 2 steps 8",  # two batches each
    "train_lightning_pack.py": "unisono 2 steps 16",
}
"""Programs that are fed from a pack of 140 samples, in batches of 16 for two epochs, and what they print."""


def write_program(folder: Path, page: str, name: str, library: str) -> Path:
    """The program of that name as the page shows it."""
    text = (DOCS / "how_to" / page).read_text(encoding="utf-8")
    assert f"unisono run --ranks 2 {name}\n" in text
    shown = re.search(rf'```python title="{name}"\n(.*?)```', text, re.DOTALL)
    assert shown
    if find_spec(library) is None and os.environ.get("UNISONO_EXAMPLES") != "all":
        pytest.skip(f"{library} is not installed; make examples installs it")
    (folder / name).write_text(shown[1], encoding="utf-8")
    return folder / name


@pytest.mark.parametrize("name", NEEDS)
def test_it_runs_unmodified(
    unisono: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, name: str
) -> None:
    program = write_program(tmp_path, "run_torchrun_programs.md", name, NEEDS[name])
    done = unisono("run", "--ranks", "2", str(program), UNISONO_BACKEND_NAME="unisono")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "unisono 2" in done.stdout


@pytest.mark.parametrize("name", FED)
def test_it_is_fed_from_a_pack(
    unisono: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, name: str
) -> None:
    program = write_program(tmp_path, "feed_a_framework.md", name, NEEDS[name.replace("_pack", "")])
    setup = DOCS / "setup" / "how_to_feed_a_framework.py"
    subprocess.run([sys.executable, str(setup)], cwd=tmp_path, check=True)
    assert unisono("pack", "cifar10-images", "packs/cifar10").returncode == 0
    done = unisono("run", "--ranks", "2", str(program), UNISONO_BACKEND_NAME="unisono")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(FED[name]) == 2
