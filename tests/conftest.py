"""What the tests share: running commands on real MPI ranks, within a time limit, and pictures to pack."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from PIL import Image

from unisono.launch import find_mpiexec, launch_environment, ranks_started

settings.register_profile("unisono", deadline=None)  # how long an example takes is no property of it
settings.load_profile("unisono")

ROOT = Path(__file__).parent.parent
UNDER_MPIEXEC = ranks_started(os.environ) is not None

collect_ignore = [] if UNDER_MPIEXEC else ["mpi"]

Run = Callable[..., subprocess.CompletedProcess[str]]


def clean_environment() -> dict[str, str]:
    """This environment as a launcher would pass it on."""
    return launch_environment(os.environ, terminal=False)


@pytest.fixture
def mpiexec() -> Run:
    """Runs `python ARGUMENTS` on a number of ranks; a run that takes too long fails."""

    def run(
        ranks: int, *arguments: str, timeout: float = 120, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        command = [str(find_mpiexec()), "-n", str(ranks), sys.executable, *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, env=clean_environment(), cwd=cwd, check=False
        )

    return run


@pytest.fixture
def unisono(tmp_path: Path) -> Run:
    """Runs `unisono ARGUMENTS` as a person would, in an empty folder."""

    def run(*arguments: str, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "unisono", *arguments],
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**clean_environment(), **environment},
            cwd=tmp_path,
            check=False,
        )

    return run


@pytest.fixture
def recipe() -> str:
    """The path of the recipe that everybody runs first."""
    return str(ROOT / "recipes" / "digits.toml")


@pytest.fixture
def pictures() -> Callable[..., Path]:
    """Writes a folder of JPEGs for each class: `count` each, in a colour of the class, with noise."""

    def write(
        folder: Path,
        classes: Sequence[str] = ("cat", "dog"),
        count: int = 6,
        size: tuple[int, int] = (40, 32),
        seed: int = 0,
    ) -> Path:
        dice = np.random.default_rng(seed)
        for name in classes:
            (folder / name).mkdir(parents=True, exist_ok=True)
            color = dice.integers(40, 216, 3)
            for number in range(count):
                noise = dice.integers(-40, 40, (size[1], size[0], 3))
                Image.fromarray((color + noise).astype(np.uint8)).save(folder / name / f"{number:03}.jpg")
        return folder

    return write
