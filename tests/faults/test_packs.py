"""A pack that is broken, or does not fit the ranks, ends all of them, soon, with one clear line and exit code 2."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from tests.progress import Run
from tests.usage_errors import assert_one_line_error

from unisono.data.pack.packing import PackOptions, pack
from unisono.data.sources import find

RECIPE = """
[data]
pack = "pack"
[training]
epochs = 1
batch = 8
"""


def write(folder: Path, part: str, count: int) -> None:
    """IDX files of 8 x 8 images."""
    rng = np.random.default_rng(count)
    for name, shape, below in (("images-idx3", (count, 8, 8), 256), ("labels-idx1", (count,), 2)):
        head = bytes((0, 0, 8, len(shape))) + np.array(shape, ">i4").tobytes()
        (folder / f"{part}-{name}-ubyte").write_bytes(head + rng.integers(0, below, shape, np.uint8).tobytes())


def make(folder: Path, test_samples: int) -> Path:
    """A data set of 16 samples to train on and some that are held out, in stripes of 4, with a recipe."""
    (folder / "idx").mkdir()
    write(folder / "idx", "train", 16)
    write(folder / "idx", "t10k", test_samples)
    for name, part in find(folder / "idx").items():
        pack(part, folder / "pack" / name, PackOptions(stripes=-(-len(part) // 4)), 1, lambda: None)
    (folder / "recipe.toml").write_text(RECIPE)
    return folder / "pack"


@pytest.fixture
def packs(tmp_path: Path) -> Path:
    """Packs of 16 and of 4 samples."""
    return make(tmp_path, test_samples=4)


def flip(path: Path) -> None:
    """Flip a byte of a stripe's first sample."""
    content, pixels = bytearray(path.read_bytes()), path.parents[2] / "idx/train-images-idx3-ubyte"
    content[content.index(pixels.read_bytes()[16 + 12 * 64 : 16 + 13 * 64]) + 5] ^= 1
    path.write_bytes(content)


def test_a_flipped_byte_that_one_rank_reads(unisono: Run, packs: Path) -> None:
    """As a person meets it."""
    flip(packs / "train/stripe-00003.arrow")
    done = unisono("train", "recipe.toml", "--ranks", "2", "--set", "data.storage=partitioned")
    assert_one_line_error(done, f"rank 1: {packs}/train/stripe-00003.arrow is damaged: batch 0 has the checksum ")


def test_a_flipped_byte_of_what_ranks_hold_together(on_ranks: Run, packs: Path) -> None:
    flip(packs / "train/stripe-00003.arrow")
    done = on_ranks("train", "recipe.toml", "--set", "data.storage=replicated")
    assert_one_line_error(done, f"rank 1: {packs}/train/stripe-00003.arrow is damaged: batch 0 has the checksum ")


def test_a_flipped_byte_that_one_rank_streams_ends_all_of_them(unisono: Run, packs: Path) -> None:
    """Both ranks have begun the run: the stripe is whole by its size, and only one of them reads it."""
    flip(packs / "train/stripe-00003.arrow")
    done = unisono("train", "recipe.toml", "--ranks", "2", "--set", "data.storage=streamed")
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "stripe-00003.arrow" in line]
    assert re.match(rf"unisono: rank [01]: {packs}/train/stripe-00003\.arrow is damaged: batch 0 has the ", line)
    assert "Traceback" not in done.stderr


def test_a_stripe_that_one_rank_misses(on_ranks: Run, packs: Path) -> None:
    (packs / "train/stripe-00000.arrow").unlink()
    done = on_ranks("train", "recipe.toml", "--ranks", "2")
    assert_one_line_error(done, f"rank 0: {packs}/train is incomplete: stripe-00000.arrow is missing")


def test_an_index_that_the_ranks_find_truncated(on_ranks: Run, packs: Path) -> None:
    index = packs / "test/index.arrow"
    index.write_bytes(index.read_bytes()[:-100])
    done = on_ranks("train", "recipe.toml", "--ranks", "2")
    assert_one_line_error(done, f"rank 0: {packs}/test/index.arrow is damaged or incomplete (")


def test_more_ranks_than_samples_are_held_out(on_ranks: Run, tmp_path: Path) -> None:
    make(tmp_path, test_samples=1)
    done = on_ranks("train", "recipe.toml", "--ranks", "2")
    assert_one_line_error(done, "2 ranks share 1 samples, so some would hold none; start at most 1")


def test_what_is_known_before_a_rank_is_started(in_process: Run, packs: Path) -> None:
    def train(*changes: str) -> subprocess.CompletedProcess[str]:
        return in_process("train", "recipe.toml", *(f"--set={change}" for change in changes))

    assert_one_line_error(train("ranks=9"), "9 ranks share batches of 8 samples, so some would have none")
    assert_one_line_error(train("training.batch=17"), f"training.batch = 17, but {packs} has 16 samples to train on")
    no_folder = "packs has no pack named train or training: there is no such folder"
    assert_one_line_error(train("data.pack=packs"), no_folder)
    index = packs / "train/index.arrow"
    index.write_bytes(index.read_bytes()[:-100])
    assert_one_line_error(train("ranks=2"), f"{packs}/train/index.arrow is damaged or incomplete (")
