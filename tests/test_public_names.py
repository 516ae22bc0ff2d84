import subprocess
import sys

import pytest

import unisono


def test_these_and_no_others() -> None:
    exchanges = ["BSP", "EASGD", "DiLoCo", "Exchange", "KVStore", "LocalSGD", "Sharded"]
    classes = [*exchanges, "Trainer", "UnisonoError", "World"]
    assert unisono.__all__ == [
        *classes,
        "add_samples",
        "init",
        "no_sync",
        "own_samples",
        "parallel",
        "shares",
        "synchronize",
    ]
    assert dir(unisono) == sorted(unisono.__all__)
    assert all(getattr(unisono, name).__name__ == name for name in unisono.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = unisono.nonsense


def test_importing_it_starts_neither_mpi_nor_torch() -> None:
    code = "import sys, unisono, unisono.cli; print([m for m in ('torch', 'mpi4py') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
