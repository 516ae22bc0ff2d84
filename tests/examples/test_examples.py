"""The examples run as their first lines say, and learn to read digits.

Two of them here; `make examples` runs this file with UNISONO_EXAMPLES=all.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = {"lightning_run": "lightning", "accelerate_run": "accelerate"}
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
RUN = NAMES if os.environ.get("UNISONO_EXAMPLES") == "all" else ["ddp", "fsdp2"]


@pytest.mark.parametrize("name", RUN)
def test_example(mpiexec: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, name: str) -> None:
    if name in NEEDS and find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed; make examples installs it")
    done = mpiexec(2, str(EXAMPLES / f"{name}.py"), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    said = re.search(r"^accuracy (\S+) on 2 ranks$", done.stdout, re.MULTILINE)
    assert said, done.stdout
    assert float(said[1]) > 0.9
    assert not list(tmp_path.iterdir()), "it leaves no files behind"


def test_every_example_is_told_of() -> None:
    readme = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f"mpiexec -n 2 python examples/{path.name}" in readme, path.name
        assert f"mpiexec -n 2 python examples/{path.name}" in path.read_text(), path.name
