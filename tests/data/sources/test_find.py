"""Each kind of data set is found for what it is."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from unisono.data.kinds import AUDIO, IMAGE, RAW
from unisono.data.sources import FORMATS, find
from unisono.errors import PackError


def folders(path: Path) -> Path:
    for name in ("train/cat", "train/dog", "test/dog"):
        (path / name).mkdir(parents=True)
        (path / name / "1.jpg").write_bytes(b"x")
    return path


def audio_samples(path: Path) -> Path:
    (path / "0_anna_1.wav").write_bytes(b"x")
    return path


def idx(path: Path) -> Path:
    (path / "train-images-idx3-ubyte").write_bytes(bytes((0, 0, 8, 3, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 7)))
    (path / "train-labels-idx1-ubyte").write_bytes(bytes((0, 0, 8, 1, 0, 0, 0, 1, 0)))
    return path


def cifar(path: Path) -> Path:
    for batch in range(1, 6):
        (path / f"data_batch_{batch}.bin").write_bytes(bytes(3073))
    return path


def shard(path: Path) -> Path:
    with tarfile.open(path / "0.tar", "w") as tar:
        entry = tarfile.TarInfo("cat/1.jpg")
        entry.size = 1
        tar.addfile(entry, io.BytesIO(b"x"))
    return path


def arrow(path: Path) -> Path:
    table = pa.table({"image": [b"x"], "label": [0]})
    with pa.OSFile(str(path / "a.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return path


def tabular(path: Path) -> Path:
    folders(path)
    (path / "some.csv").write_text("path,label\ntrain/cat/1.jpg,0\n")
    return path / "some.csv"


@pytest.mark.parametrize(
    ("lay", "kind", "parts"),
    [
        (folders, IMAGE, ["test", "train"]),
        (audio_samples, AUDIO, [""]),
        (idx, RAW, ["train"]),
        (cifar, RAW, ["train"]),
        (shard, IMAGE, [""]),
        (arrow, IMAGE, [""]),
        (tabular, IMAGE, [""]),
    ],
)
def test_every_kind_is_found_by_one_reader_alone(
    tmp_path: Path, lay: Callable[[Path], Path], kind: str, parts: list[str]
) -> None:
    path = lay(tmp_path)
    sources = find(path)
    assert sorted(sources) == parts
    assert {source.kind for source in sources.values()} == {kind}
    assert all(source.files and all(file.is_file() for file in source.files) for source in sources.values())
    assert sum(FORMATS.load(name)(path) is not None for name in FORMATS) == 1


def test_a_class_has_the_same_number_in_every_part(tmp_path: Path) -> None:
    """The dog is the second class, though no cat is in the test."""
    sources = find(folders(tmp_path))
    assert sources["train"].classes == sources["test"].classes == ("cat", "dog")
    np.testing.assert_array_equal(sources["test"].labels, [1])


def test_a_column_whose_name_is_no_utf_8_is_refused(tmp_path: Path) -> None:
    path = tabular(tmp_path)
    path.write_bytes("path,label,größe\n1.jpg,0,1\n".encode("latin-1"))
    with pytest.raises(PackError, match=r"some\.csv has a name or a text that is no UTF-8: .* byte 0xf6"):
        find(path)


def test_a_path_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PackError, match="nowhere: no such file or folder"):
        find(tmp_path / "nowhere")


def test_what_is_not_known_is_refused_with_what_is(tmp_path: Path) -> None:
    (tmp_path / "words.doc").write_text("words")
    for path in (tmp_path, tmp_path / "words.doc"):
        with pytest.raises(PackError, match=r"is no data set of a known kind: folders of classes .* a table"):
            find(path)
