"""What programs on four ranks have said, of which each test looks at one."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from tests.progress import run

from unisono.launch import find_mpiexec, launch_environment

PROGRAM = Path(__file__).with_name("one_after_another.py")


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each program of this folder has said, by its name: all in one launch, since starting it takes long."""
    folder = tmp_path_factory.mktemp("four_ranks")
    programs = "random_operations.py 400", "stack.py checkpoint", "parity.py"
    command = [str(find_mpiexec()), "-n", "4", sys.executable, str(PROGRAM), *programs]
    done = run(command, cwd=folder, env=launch_environment(os.environ, terminal=False))
    assert done.returncode == 0, done.stdout + done.stderr
    _, *parts = re.split(r"^== (.*)\n", done.stdout, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))
