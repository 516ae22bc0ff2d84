"""Programs of Accelerate, Hugging Face's Trainer and Lightning run under `unisono run`, as the page about them shows.

`make examples` installs these libraries; without them the tests are skipped.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "run_torchrun_programs.md"
NEEDS = {
    "train_accelerate.py": "accelerate",
    "train_trainer.py": "transformers",
    "train_lightning.py": "lightning",
}


@pytest.mark.parametrize("name", NEEDS)
def test_it_runs_unmodified(
    unisono: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, name: str
) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert f"unisono run --ranks 2 {name}\n" in page
    shown = re.search(rf'```python title="{name}"\n(.*?)```', page, re.DOTALL)
    assert shown
    if find_spec(NEEDS[name]) is None and os.environ.get("UNISONO_EXAMPLES") != "all":
        pytest.skip(f"{NEEDS[name]} is not installed; make examples installs it")
    (tmp_path / name).write_text(shown[1], encoding="utf-8")
    done = unisono("run", "--ranks", "2", str(tmp_path / name))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "unisono 2" in done.stdout
