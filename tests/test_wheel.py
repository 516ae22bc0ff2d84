"""Wheel and sdist: `pip install` of the wheel in an environment with the base dependencies alone, which then trains."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.launches


def command(*arguments: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(arguments, capture_output=True, text=True, check=False, env=environment, **options)  # type: ignore[call-overload,no-any-return]


def dependencies(name: str, extras: frozenset[str], seen: set[str]) -> set[str]:
    """Names of the installed distributions that a distribution needs, and those that these need."""
    for line in distribution(name).requires or ():
        needed = Requirement(line)
        wanted = [{"extra": extra} for extra in (*extras, "")]
        if needed.name in seen or (needed.marker and not any(needed.marker.evaluate(extra) for extra in wanted)):
            continue
        try:
            distribution(needed.name)
        except PackageNotFoundError:
            continue
        seen.add(needed.name)
        dependencies(needed.name, frozenset(needed.extras), seen)
    return seen


def link(name: str, prefix: Path) -> None:
    """Make an installed distribution visible in another environment: links to its packages, and to its programs."""
    packages = prefix / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for file in distribution(name).files or ():
        source = Path(str(distribution(name).locate_file(file))).resolve()
        above = file.parts[0] == ".."
        there = source if above else Path(str(distribution(name).locate_file(file.parts[0])))
        target = Path(os.path.normpath(packages / file)) if above else packages / file.parts[0]
        if not target.exists() and there.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(there)


SOURCES = (".py", ".toml", ".c", ".h", ".so")
"""Endings of what is written by hand, and of what is compiled from it."""


def test_the_wheel_trains_where_the_sources_are_not(tmp_path: Path) -> None:
    built = command(sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path / "dist", ROOT)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,), (sdist,) = (tmp_path / "dist").glob("*.whl"), (tmp_path / "dist").glob("*.tar.gz")
    members = zipfile.ZipFile(wheel).infolist()
    names = [member.filename for member in members]
    assert {"unisono/recipes/digits.toml", "unisono/machines/taihulight.toml", "unisono/py.typed"} <= set(names)
    assert {"unisono/data/digits.csv.gz", "unisono/papers/dimd.toml", "unisono/papers/predicted.json"} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"unisono"}
    compiled = [name for name in names if name.endswith(".so")]
    assert len(compiled) == (shutil.which(os.environ.get("CC", "cc")) is not None)
    # The sources grow with the project. What is no source grows only by mistake: a picture, a result, a data set.
    assert sum(member.compress_size for member in members if not member.filename.endswith(SOURCES)) < 150_000
    with tarfile.open(sdist) as archive:
        inside = {member.partition("/")[2] for member in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "src/unisono/world.py"} <= inside
    assert not any(name.startswith((".venv", "site/", "runs/")) for name in inside)

    bare = tmp_path / "bare"
    assert command(sys.executable, "-m", "venv", bare).returncode == 0
    needed = dependencies("unisono", frozenset({"mpich"}), set())
    assert not needed & {"pyarrow", "pillow", "opencv-python-headless", "scikit-learn", "pytest"}
    for name in needed:
        link(name, bare)
    installed = command(bare / "bin" / "python", "-m", "pip", "install", "--no-deps", "--no-index", wheel)
    assert installed.returncode == 0, installed.stderr

    where = command(bare / "bin" / "python", "-c", "import unisono; print(unisono.__file__)", cwd=tmp_path)
    assert where.stdout.startswith(str(bare)), where
    trained = command(bare / "bin" / "unisono", "train", "digits", "--set", "training.epochs=1", cwd=tmp_path)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert "test accuracy" in trained.stdout
    figure = command(bare / "bin" / "unisono", "papers", "swcaffe-figure-10", cwd=tmp_path)
    assert "715.45 x" in figure.stdout, figure
    for arguments in (["pack", "images", "packs"], ["bench", "shuffle", "--ranks=2"]):
        refused = command(bare / "bin" / "unisono", *arguments, cwd=tmp_path)
        assert refused.returncode == 2, refused
        assert "pip install '.[data]'" in refused.stderr
    messages = command(bare / "bin" / "unisono", "bench", "messages", "--ranks=2", cwd=tmp_path)
    assert "message of 1 MiB" in messages.stdout, messages
