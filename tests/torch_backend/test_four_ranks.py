"""What programs on four ranks have said, of which each test looks at one: all in one launch, since that takes long."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from tests.progress import run

from unisono.launch import find_mpiexec, launch_environment

PROGRAM = Path(__file__).with_name("one_after_another.py")

WAYS = ("ddp", "fsdp2", "powersgd", "tensor_parallel", "zero1")

ALLOWED = {**{(way, "float64"): 1e-9 for way in WAYS}, ("ddp", "float32"): 1e-3}

LINE = re.compile(r"^(\w+) (\w+): difference (\S+), loss (\S+) to (\S+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each program of this folder has said, by its name."""
    folder = tmp_path_factory.mktemp("four_ranks")
    programs = "random_operations.py 400", "stack.py checkpoint", "parity.py ddp float64"
    command = [str(find_mpiexec()), "-n", "4", sys.executable, str(PROGRAM), *programs]
    done = run(command, cwd=folder, env=launch_environment(os.environ, terminal=False))
    assert done.returncode == 0, done.stdout + done.stderr
    _, *parts = re.split(r"^== (.*)\n", done.stdout, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_random_operations_on_random_subsets(four_ranks: dict[str, str]) -> None:
    """Many in flight; the same program does 10,000 for the record."""
    assert four_ranks["random_operations.py"].startswith("400 operations are right")


def test_every_part_of_what_pytorch_builds_on_its_collectives(four_ranks: dict[str, str]) -> None:
    """The program asserts it on every rank."""
    assert four_ranks["stack.py"].split() == ["join", "mesh_of_two_dimensions", "distributed_checkpoint", "objects"]


def test_losses_are_those_of_gloo(four_ranks: dict[str, str]) -> None:
    """However PyTorch trains over unisono, it learns what it learns over gloo, step by step."""
    print(four_ranks["parity.py"])
    rows = LINE.findall(four_ranks["parity.py"])
    assert {(way, dtype) for way, dtype, *_ in rows} == ALLOWED.keys()
    for way, dtype, difference, first, last in rows:
        assert float(difference) <= ALLOWED[way, dtype], f"{way} in {dtype} differs by {difference}"
        assert float(last) < 0.8 * float(first), f"{way} in {dtype} learned nothing: {first} to {last}"
