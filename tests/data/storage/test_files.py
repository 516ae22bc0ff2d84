"""Training from the files that a pack was made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

from unisono.data.feed import packed_feed
from unisono.data.options import DataOptions
from unisono.data.pack.packing import PackOptions, pack
from unisono.data.sources import find
from unisono.errors import DecodeError, PackError

OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]

BATCH, SEED = 8, 3


@pytest.fixture
def options(tmp_path: Path) -> DataOptions:
    """Grey PNG files of two classes, one of them broken, and a pack of them."""
    for split, count in (("train", 21), ("test", 9)):
        for index in range(count):
            path = tmp_path / "files" / split / ("even", "odd")[index % 2] / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(path), np.random.default_rng(index).integers(0, 256, (8, 8), np.uint8))
    (tmp_path / "files" / "train" / "even" / "broken.png").write_bytes(b"no image")
    for split, source in find(tmp_path / "files").items():
        pack(source, tmp_path / "pack" / split, PackOptions(stripes=2), 1, lambda: None)
    return DataOptions(pack=str(tmp_path / "pack"), files=str(tmp_path / "files"), size=8, augment="shift", threads=2)


def seen(options: DataOptions, world: Any) -> list[torch.Tensor]:
    """What a rank sees in an epoch, and in the test set."""
    feed = packed_feed(options, world, SEED)
    tensors = [each.clone() for batch in feed.epoch(1, BATCH, 0) for each in batch]
    tensors += [each.clone() for batch in feed.test_batches(BATCH) for each in batch]
    feed.close()
    return tensors


@pytest.mark.parametrize("ranks", [1, 3])
def test_batches_are_those_of_the_pack_in_memory(on_ranks: OnRanks, options: DataOptions, ranks: int) -> None:
    from_files, from_memory = (
        on_ranks(ranks, lambda world, storage=storage: seen(replace(options, storage=storage), world))
        for storage in ("files", "partitioned")
    )
    for result, expected in zip(from_files, from_memory, strict=True):
        assert all(map(torch.equal, result, expected))
        assert len(result) == len(expected) > 0


def test_files_that_packing_encodes_again_are_encoded_as_it_does(on_ranks: OnRanks, tmp_path: Path) -> None:
    rotated = Image.Exif()
    rotated[ExifTags.Base.Orientation] = 6
    for split in ("train", "test"):
        for index, (ending, mode) in enumerate([("jpg", "RGB"), ("bmp", "RGB"), ("png", "RGBA"), ("jpg", "CMYK")]):
            path = tmp_path / "files" / split / "one" / f"{index}.{ending}"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng(index).integers(0, 256, (12, 9, 3), np.uint8)
            Image.fromarray(pixels).convert(mode).save(path, **({} if index else {"exif": rotated}))
        pack(find(path.parents[1])[""], tmp_path / "pack" / split, PackOptions(quality=70), 1, lambda: None)
    options = DataOptions(pack=str(tmp_path / "pack"), files=str(tmp_path / "files"), size=8, threads=1)
    from_files, from_memory = (
        on_ranks(1, lambda world, storage=storage: seen(replace(options, storage=storage), world))[0]
        for storage in ("files", "partitioned")
    )
    assert all(map(torch.equal, from_files, from_memory))


def test_a_file_that_is_gone_is_named(on_ranks: OnRanks, options: DataOptions, tmp_path: Path) -> None:
    def work(world: Any) -> None:
        feed = packed_feed(replace(options, storage="files"), world, SEED)
        (tmp_path / "files" / "train" / "odd" / "5.png").unlink()
        with pytest.raises(DecodeError, match=r"cannot read odd/5\.png in .*: No such file"):
            list(feed.epoch(0, BATCH, 0))
        feed.close()

    on_ranks(1, work)


def test_a_file_that_was_cut_off_since_is_named(on_ranks: OnRanks, options: DataOptions, tmp_path: Path) -> None:
    def work(world: Any) -> None:
        feed = packed_feed(replace(options, storage="files"), world, SEED)
        with pytest.raises(DecodeError, match=rf"odd/5\.png in .* has {size - 9} bytes, and had {size} when it was"):
            list(feed.epoch(0, BATCH, 0))
        feed.close()

    file = tmp_path / "files" / "train" / "odd" / "5.png"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-9])
    on_ranks(1, work)


def test_files_that_the_pack_was_not_made_from_are_refused(
    on_ranks: OnRanks, options: DataOptions, tmp_path: Path
) -> None:
    def refused(files: str) -> str:
        with pytest.raises(PackError) as caught:
            on_ranks(1, lambda world: packed_feed(replace(options, storage="files", files=files), world, SEED))
        return str(caught.value)

    assert "files is empty: set data.files" in refused("")
    (tmp_path / "files" / "train" / "odd" / "99.png").write_bytes(b"one more")
    assert "has 22 samples of 2 classes, and" in refused(options.files)
