from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from unisono.data.pack.describe import describe
from unisono.data.pack.index import About, Index, write_index
from unisono.data.pack.layout import INDEX
from unisono.errors import PackError


def an_index(folder: Path, about: About, labels: list[int]) -> None:
    """An index whose samples have 10, 20, 30, ... bytes."""
    folder.mkdir(parents=True)
    places = np.zeros(len(labels), np.int32)
    lengths = 10 * np.arange(1, len(labels) + 1, dtype=np.int32)
    write_index(Index(about, places, places, places, lengths, np.array(labels, np.int32)), folder / INDEX)


def test_what_a_pack_holds(tmp_path: Path) -> None:
    skipped = ("cat/1.jpg", "it is empty"), ("dog [2].jpg", "cannot identify image file")
    about = About("image", ("cat", "hippopotamus"), None, (0.5,), (0.25,), skipped, (("stripe-00000.arrow", 700),) * 2)
    an_index(tmp_path / "pack", about, [0, 1, 1])
    head, sizes, colors, classes, *rest = describe(tmp_path / "pack")
    assert head == f"{tmp_path / 'pack'}: 3 samples (image), 0.0 MB in 2 stripes"
    assert sizes.split() == ["bytes", "of", "a", "sample", "10", "to", "30,", "mean", "20"]
    assert colors.split() == ["channels", "0.500", "±", "0.250"]
    assert classes.split() == ["classes", "2"]
    assert [line.split() for line in rest[:2]] == [["cat", "1"], ["hippopotamus", "2"]]
    assert rest[2].split() == ["skipped", "2"]
    assert rest[3:] == ["    cat/1.jpg: it is empty", "    dog [2].jpg: cannot identify image file"]


def test_raw_samples_have_a_shape_and_audio_files_no_channels(tmp_path: Path) -> None:
    an_index(tmp_path / "raw", About("raw", ("0",), (8, 9, 3), (0.5,) * 3, (0.25,) * 3), [0])
    an_index(tmp_path / "audio", About("audio", ("0",)), [0])
    raw, sound = list(describe(tmp_path / "raw")), list(describe(tmp_path / "audio"))
    assert "1 samples (raw 8 x 9 x 3)" in raw[0]
    assert any("channels" in line for line in raw)
    assert not any("channels" in line for line in sound)


def test_of_many_classes_the_first_are_reported(tmp_path: Path) -> None:
    classes = tuple(f"class {number}" for number in range(25))
    an_index(tmp_path / "pack", About("image", classes), [*range(24), 22, 22])
    lines = list(describe(tmp_path / "pack"))
    assert [line.split()[1] for line in lines if line.startswith("    class")] == [str(number) for number in range(20)]
    assert lines[-1] == "    and 5 more, with 0 to 3 samples"


def test_all_parts_of_a_data_set_are_reported(tmp_path: Path) -> None:
    for part in ("train", "test"):
        an_index(tmp_path / part, About("image", ("cat",)), [0])
    heads = [line for line in describe(tmp_path) if "samples (" in line]
    assert [head.split(":")[0] for head in heads] == [str(tmp_path / "test"), str(tmp_path / "train")]


def test_a_folder_without_packs_is_reported(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(PackError, match="is no pack, and has none in its subfolders; create one with"):
            list(describe(folder))


def test_of_text_the_tokens_are_reported(tmp_path: Path) -> None:
    an_index(tmp_path / "pack", About("text", ("a", "b", "c"), (9,)), [0, 0])
    head, _, tokens = describe(tmp_path / "pack")
    assert "2 samples (text 9)" in head
    assert tokens.split() == ["tokens", "16", "of", "a", "vocabulary", "of", "3"]
