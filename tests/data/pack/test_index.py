from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.data.pack import INDEX
from unisono.data.pack.index import COLUMNS, About, Index, describe, read_index, write_index
from unisono.errors import PackError

ABOUT = About(
    kind="image",
    classes=("cat", "dog"),
    mean=(0.1, 1 / 3, 0.7),
    mean_image=(0.25, 0.5),
    std=(0.25, 0.5, 0.125),
    skipped=(("dog/ö.jpg", "it is empty"),),
    stripes=(("stripe-00000.arrow", 1_234), ("stripe-00002.arrow", 777)),
)


def an_index(about: About = ABOUT) -> Index:
    """Seven samples in two stripes."""
    columns = (
        [0, 0, 0, 0, 1, 1, 1],
        [0, 0, 1, 1, 0, 0, 1],
        [0, 1, 0, 1, 0, 1, 0],
        [9, 8, 7, 6, 5, 4, 3],
        [0, 1] * 3 + [1],
    )
    return Index(about, *(np.array(column, np.int32) for column in columns))


def same(index: Index, other: Index) -> bool:
    return index.about == other.about and all(
        np.array_equal(getattr(index, name), getattr(other, name)) and getattr(index, name).dtype == np.int32
        for name in COLUMNS
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a whole index."""
    made = tmp_path_factory.mktemp("pack")
    write_index(an_index(), made / INDEX)
    return made


@pytest.fixture(scope="module")
def harm(folder: Path) -> Callable[[bytes], Path]:
    """Writes a harmed index into a folder of its own."""
    (folder / "harmed").mkdir()

    def write(content: bytes) -> Path:
        (folder / "harmed" / INDEX).write_bytes(content)
        return folder / "harmed"

    return write


def test_an_index_comes_back_as_it_was(folder: Path) -> None:
    index = read_index(folder)
    assert same(index, an_index())
    assert (index.folder, len(index), index.nbytes) == (folder, 7, 42)


@pytest.mark.parametrize("about", [About("raw", ("0",), (8, 8, 3), (0.5,), (0.5,)), About("audio", ())])
def test_whatever_a_pack_is_comes_back(about: About, tmp_path: Path) -> None:
    write_index(an_index(about), tmp_path / INDEX)
    assert read_index(tmp_path).about == about


def test_lengths_are_added_without_overflow() -> None:
    assert replace(an_index(), length=np.full(3, (1 << 31) - 1, np.int32)).nbytes == 3 * ((1 << 31) - 1)


def test_an_index_opens_in_arrow(folder: Path) -> None:
    with pa.OSFile(str(folder / INDEX)) as file:
        table = pa.ipc.open_file(file).read_all()
    assert table.schema.names == ["stripe", "batch", "row", "length", "label"]
    assert table["length"].to_pylist() == [9, 8, 7, 6, 5, 4, 3]


def test_what_is_no_pack_is_reported(tmp_path: Path) -> None:
    with pytest.raises(PackError, match=r"empty is no pack: it has no index\.arrow; create one with unisono pack"):
        (tmp_path / "empty").mkdir()
        read_index(tmp_path / "empty")
    with pytest.raises(PackError, match=r"nowhere is no pack: there is no such folder; create one with unisono pack"):
        read_index(tmp_path / "nowhere")


def unsigned(table: pa.Table) -> pa.Table:
    fields = [pa.field(name, pa.uint32()) for name in COLUMNS]
    return table.cast(pa.schema(fields, table.schema.metadata))


def misnamed(table: pa.Table) -> pa.Table:
    return table.rename_columns({"row": "rows"})


def short(table: pa.Table) -> pa.Table:
    return table.drop_columns("label")


def bare(table: pa.Table) -> pa.Table:
    return table.replace_schema_metadata(None)


@pytest.mark.parametrize("change", [unsigned, misnamed, short, bare])
def test_another_arrow_file_is_no_index(folder: Path, tmp_path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    with pa.OSFile(str(folder / INDEX)) as file:
        table = change(pa.ipc.open_file(file).read_all())
    with pa.OSFile(str(tmp_path / INDEX), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(PackError, match=r"index\.arrow is no index of a pack"):
        read_index(tmp_path)


@pytest.mark.parametrize("version", [1, 3])
def test_an_index_of_another_version_is_reported(tmp_path: Path, version: int) -> None:
    write_index(an_index(replace(ABOUT, version=version)), tmp_path / INDEX)
    with pytest.raises(PackError, match=rf"index\.arrow is of version {version}; this release reads version 2"):
        read_index(tmp_path)


@given(choose=st.data())
def test_a_truncated_index_is_reported(folder: Path, harm: Callable[[bytes], Path], choose: st.DataObject) -> None:
    content = (folder / INDEX).read_bytes()
    with pytest.raises(PackError, match=r"index\.arrow is damaged or incomplete \(.*\); pack the data again"):
        read_index(harm(content[: choose.draw(st.integers(0, len(content) - 1))]))


def test_an_index_whose_names_are_no_text_is_reported(folder: Path, harm: Callable[[bytes], Path]) -> None:
    with pytest.raises(PackError, match=r"index\.arrow is damaged or incomplete \(.*\); pack the data again"):
        read_index(harm((folder / INDEX).read_bytes().replace(b"length", b"\xecength")))


@given(choose=st.data())
def test_an_index_with_any_byte_flipped_is_refused_or_still_right(
    folder: Path, harm: Callable[[bytes], Path], choose: st.DataObject
) -> None:
    content = bytearray((folder / INDEX).read_bytes())
    content[choose.draw(st.integers(0, len(content) - 1))] ^= choose.draw(st.integers(1, 255))
    try:
        index = read_index(harm(bytes(content)))
    except PackError as error:
        assert INDEX in str(error)
    else:
        assert same(index, an_index())


@pytest.mark.parametrize("what", [*COLUMNS, "about"])
@settings(max_examples=30)
@given(choose=st.data())
def test_a_flipped_byte_in_numbers_or_words_is_refused(
    folder: Path, harm: Callable[[bytes], Path], what: str, choose: st.DataObject
) -> None:
    content = bytearray((folder / INDEX).read_bytes())
    about = json.dumps(asdict(ABOUT)).encode()
    part = about if what == "about" else getattr(an_index(), what).tobytes()
    begins = [place for place in range(len(content)) if content.startswith(part, place)]
    assert begins
    within, mask = choose.draw(st.integers(0, len(part) - 1)), choose.draw(st.integers(1, 255))
    for begin in begins:  # Arrow writes what is beside the columns twice, and reads one of them
        content[begin + within] ^= mask
    with pytest.raises(PackError, match=r"index\.arrow is damaged: its checksum is not the one that was written"):
        read_index(harm(bytes(content)))


def written_index(folder: Path, about: About, labels: list[int]) -> None:
    """An index whose samples have 10, 20, 30, ... bytes."""
    folder.mkdir(parents=True)
    places = np.zeros(len(labels), np.int32)
    lengths = 10 * np.arange(1, len(labels) + 1, dtype=np.int32)
    write_index(Index(about, places, places, places, lengths, np.array(labels, np.int32)), folder / INDEX)


def test_what_a_pack_holds(tmp_path: Path) -> None:
    skipped = ("cat/1.jpg", "it is empty"), ("dog [2].jpg", "cannot identify image file")
    about = About("image", ("cat", "hippopotamus"), None, (0.5,), (0.25,), skipped, (("stripe-00000.arrow", 700),) * 2)
    written_index(tmp_path / "pack", about, [0, 1, 1])
    head, sizes, colors, classes, *rest = describe(tmp_path / "pack")
    assert head == f"{tmp_path / 'pack'}: 3 samples (image), 0.0 MB in 2 stripes"
    assert sizes.split() == ["bytes", "of", "a", "sample", "10", "to", "30,", "mean", "20"]
    assert colors.split() == ["channels", "0.500", "±", "0.250"]
    assert classes.split() == ["classes", "2"]
    assert [line.split() for line in rest[:2]] == [["cat", "1"], ["hippopotamus", "2"]]
    assert rest[2].split() == ["skipped", "2"]
    assert rest[3:] == ["    cat/1.jpg: it is empty", "    dog [2].jpg: cannot identify image file"]


def test_raw_samples_have_a_shape_and_audio_files_no_channels(tmp_path: Path) -> None:
    written_index(tmp_path / "raw", About("raw", ("0",), (8, 9, 3), (0.5,) * 3, (0.25,) * 3), [0])
    written_index(tmp_path / "audio", About("audio", ("0",)), [0])
    raw, sound = list(describe(tmp_path / "raw")), list(describe(tmp_path / "audio"))
    assert "1 samples (raw 8 x 9 x 3)" in raw[0]
    assert any("channels" in line for line in raw)
    assert not any("channels" in line for line in sound)


def test_of_many_classes_the_first_are_reported(tmp_path: Path) -> None:
    classes = tuple(f"class {label}" for label in range(25))
    written_index(tmp_path / "pack", About("image", classes), [*range(24), 22, 22])
    lines = list(describe(tmp_path / "pack"))
    assert [line.split()[1] for line in lines if line.startswith("    class")] == [str(label) for label in range(20)]
    assert lines[-1] == "    and 5 more, with 0 to 3 samples"


def test_all_parts_of_a_data_set_are_reported(tmp_path: Path) -> None:
    for part in ("train", "test"):
        written_index(tmp_path / part, About("image", ("cat",)), [0])
    heads = [line for line in describe(tmp_path) if "samples (" in line]
    assert [head.split(":")[0] for head in heads] == [str(tmp_path / "test"), str(tmp_path / "train")]


def test_a_folder_without_packs_is_reported(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(PackError, match="is no pack, and has none in its subfolders; create one with"):
            list(describe(folder))


def test_of_text_the_tokens_are_reported(tmp_path: Path) -> None:
    written_index(tmp_path / "pack", About("text", ("a", "b", "c"), (9,)), [0, 0])
    head, _, tokens = describe(tmp_path / "pack")
    assert "2 samples (text 9)" in head
    assert tokens.split() == ["tokens", "16", "of", "a", "vocabulary", "of", "3"]
