"""The command `unisono data`."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from unisono.data.order import epoch_rng, permutation
from unisono.data.pack.index import About, Index, write_index
from unisono.data.pack.layout import INDEX
from unisono.data.quality import compare_with_permutations, shuffle_shares
from unisono.data.storage.streamed_order import blocks_of_pack, streamed_order

Run = Callable[..., subprocess.CompletedProcess[str]]


def a_pack(folder: Path) -> Index:
    """The index of 400 samples of two classes, one after the other."""
    folder.mkdir()
    places, labels = np.zeros(400, np.int32), np.repeat(np.arange(2, dtype=np.int32), 200)
    index = Index(About("image", ("cat", "dog")), places, places, places, places, labels)
    write_index(index, folder / INDEX)
    return index


def rows(reported: str) -> dict[str, list[float]]:
    """The numbers of each row of the table."""
    lines = [re.split(r"[│┃]", line) for line in reported.splitlines() if line.startswith("│")]
    return {line[1].strip(): [float(number) for number in re.findall(r"[\d.]+", "".join(line[2:]))] for line in lines}


def test_the_quality_of_a_shuffle_and_of_true_permutations(in_process: Run, tmp_path: Path) -> None:
    index = a_pack(tmp_path / "[a] pack")
    done = in_process("data", "quality", "[a] pack", "--epoch", "3", "--seed", "7", COLUMNS="120")
    assert (done.returncode, done.stderr) == (0, "")
    assert "[a] pack: the order of epoch 3, and 20 true permutations" in done.stdout
    found = compare_with_permutations(permutation(400, 7, 3), index.label)
    table = rows(done.stdout)
    assert list(table) == ["neighbours of one class", "neighbours that stayed neighbours", "distance moved"]
    for row, here, mean, off in zip(table.values(), found.found, found.mean, found.std, strict=True):
        assert row[:3] == pytest.approx([here, mean, off], abs=1e-4)
    assert [row[3] for row in table.values()] == pytest.approx([398 / 399, 1, 0], abs=1e-4)
    assert (
        done.stdout.splitlines()[-2] == f"at most {found.max_z_score:.1f} standard deviations from a true permutation"
    )
    other = in_process("data", "quality", "[a] pack", COLUMNS="120")
    assert "the order of epoch 0" in other.stdout
    assert rows(other.stdout) != table


def test_the_streamed_order_beside_the_full_permutation(in_process: Run, tmp_path: Path) -> None:
    index = a_pack(tmp_path / "pack")
    options = "--batch", "20", "--ranks", "2", "--buffer-megabytes", "8"
    done = in_process("data", "quality", "pack", "--epoch", "3", "--seed", "7", *options, COLUMNS="120")
    assert (done.returncode, done.stderr) == (0, "")
    order = streamed_order(blocks_of_pack(index), 20, 8 << 20, epoch_rng(7, 3))
    found = compare_with_permutations(shuffle_shares(order, 20, 2), index.label)
    table = rows(done.stdout.partition("2 ranks, batches of 20")[0])
    assert [row[4] for row in table.values()] == pytest.approx(found.found, abs=1e-4)
    assert done.stdout.splitlines()[-1] == (
        f"streamed: at most {found.max_z_score:.1f}, for steps of 20 samples on 2 ranks"
    )


def test_one_rank_is_named_in_the_singular(in_process: Run, tmp_path: Path) -> None:
    a_pack(tmp_path / "pack")
    done = in_process("data", "quality", "pack", "--batch=20")
    assert done.stdout.splitlines()[-1].endswith("for steps of 20 samples on 1 rank")


def test_a_folder_that_is_not_a_pack_gets_one_line(in_process: Run) -> None:
    done = in_process("data", "quality", "nowhere")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "unisono: nowhere is no pack: there is no such folder; create one with unisono pack\n"


def test_a_shuffle_is_compared_with_that_of_every_epoch(in_process: Run, tmp_path: Path) -> None:
    a_pack(tmp_path / "pack")
    size = "--batch", "40", "--supernodes", "2", "--nodes", "2"
    done = in_process("data", "quality", str(tmp_path / "pack"), "--shuffle", "every:4,parts:2", *size, COLUMNS="120")
    assert (done.returncode, done.stderr) == (0, "")
    assert "4 ranks, batches of 40" in done.stdout
    table = rows(done.stdout)
    chosen, full = table["samples that a rank sees again"]
    assert chosen > full
    chosen, full = table["MB through uplinks"]
    assert 0 < chosen < full


def test_words_that_are_no_shuffle_get_one_line(in_process: Run, tmp_path: Path) -> None:
    a_pack(tmp_path / "pack")
    done = in_process("data", "quality", str(tmp_path / "pack"), "--shuffle", "seldom")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith('unisono: data.shuffle = "seldom"; it is "epoch", "every:N" or "once"')
