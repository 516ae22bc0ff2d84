from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from unisono.data.pack import TEST_SPLITS, TRAIN_SPLITS, split_folder, train_samples
from unisono.errors import PackError


def test_how_many_samples_there_are_to_train_on(numbered: Path) -> None:
    assert train_samples("digits", "") == 1437
    assert train_samples("digits", str(numbered)) == 151


def test_parts_are_found_by_any_of_their_names(tmp_path: Path) -> None:
    for name in ("training", "valid", "test"):
        (tmp_path / name).mkdir()
    (tmp_path / "training/index.arrow").touch()
    (tmp_path / "valid/index.arrow").touch()
    assert split_folder(tmp_path, TRAIN_SPLITS) == tmp_path / "training"
    assert split_folder(tmp_path, TEST_SPLITS) == tmp_path / "valid", "test/ is no pack"


def test_what_is_not_there_is_named_with_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(PackError, match=r"has no pack named train or training: create it with unisono pack SOURCE"):
        split_folder(tmp_path, TRAIN_SPLITS)
    with pytest.raises(PackError, match=r"nowhere has no pack named test or .*: there is no such folder; create it"):
        split_folder(tmp_path / "nowhere", TEST_SPLITS)
    (tmp_path / "index.arrow").touch()
    with pytest.raises(
        PackError, match=r"is one pack without splits: .* or pack each of them into \S+/train and \S+/test$"
    ):
        split_folder(tmp_path, TRAIN_SPLITS)


def test_it_is_known_without_loading_pytorch_mpi_or_arrow() -> None:
    program = (
        "import sys, unisono.training.recipe, unisono.data.pack as splits;"
        "splits.train_samples('digits', '');"
        "print(sorted({'torch', 'mpi4py', 'mpi4py.MPI', 'pyarrow', 'PIL'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
