"""The command itself, with gloo, on a test that takes no time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from report import EXCEPTIONS

RUN = Path(EXCEPTIONS).parents[1] / "conformance" / "run.py"


def test_a_test_of_the_suite_passes_on_gloo() -> None:
    command = [sys.executable, str(RUN), "--backend=gloo", "--ranks=3", "--only=test_get_rank_size_full_group"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gloo 3 passed" in done.stdout
