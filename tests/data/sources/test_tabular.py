from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from unisono.data.kinds import AUDIO, IMAGE
from unisono.data.sources import unify_classes
from unisono.data.sources.tabular import find
from unisono.errors import PackError


def lay(folder: Path, *names: str) -> None:
    """Files whose bytes are their own names."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())


def write(table: Path, **columns: list[Any]) -> Path:
    """A table in the format that its name tells."""
    if table.suffix == ".parquet":
        parquet.write_table(pa.table(columns), table)
    else:
        between = "\t" if table.suffix == ".tsv" else ","
        rows = [list(columns), *zip(*columns.values(), strict=True)]
        table.write_text("".join(between.join(str(value) for value in row) + "\n" for row in rows))
    return table


@pytest.mark.parametrize("ending", ["csv", "tsv", "parquet"])
def test_paths_are_taken_from_the_folder_of_the_table(tmp_path: Path, ending: str) -> None:
    lay(tmp_path, "a/1.jpg", "b/2.png")
    path = write(tmp_path / f"t.{ending}", path=["b/2.png", "a/1.jpg"], label=["dog", "cat"], size=[1, 2])
    sources = find(path)
    assert sources is not None
    assert list(sources) == [""]
    source = sources[""]
    assert source.kind == IMAGE
    assert source.classes == ("cat", "dog")
    assert source.labels.tolist() == [1, 0]
    assert list(source.keys) == ["b/2.png", "a/1.jpg"]
    assert source.sizes.tolist() == [7, 7]
    assert [source.read(index) for index in range(2)] == [b"b/2.png", b"a/1.jpg"]


@pytest.mark.parametrize("path", ["path", "file", "filename", "image", "audio"])
@pytest.mark.parametrize("label", ["label", "class", "labels"])
def test_columns_have_one_of_a_few_names(tmp_path: Path, path: str, label: str) -> None:
    sources = find(write(tmp_path / "t.csv", **{label: [10, 9], path: ["1.wav", "2.wav"]}))
    assert sources is not None
    assert sources[""].kind == AUDIO
    assert sources[""].classes == ("9", "10")


def test_a_column_parts_the_data_set_and_a_class_has_one_number_in_all_parts(tmp_path: Path) -> None:
    names = [f"{index}.jpg" for index in range(5)]
    lay(tmp_path, *names)
    columns = {"path": names, "label": ["a", "b", "c", "c", "a"], "split": ["train", "train", "test", "train", "test"]}
    sources = find(write(tmp_path / "t.csv", **columns))
    assert sources is not None
    assert list(sources) == ["train", "test"]
    sources = unify_classes(sources)
    assert sources["train"].classes == sources["test"].classes == ("a", "b", "c")
    assert sources["train"].labels.tolist() == [0, 1, 2]
    assert sources["test"].labels.tolist() == [2, 0]
    assert [sources["test"].read(index) for index in range(2)] == [b"2.jpg", b"4.jpg"]


def test_names_of_splits_may_have_capitals(tmp_path: Path) -> None:
    splits = ["Train", "train", "TEST", "Mine"]
    sources = find(write(tmp_path / "t.csv", path=["1.jpg", "2.jpg", "3.jpg", "4.jpg"], label=[0] * 4, split=splits))
    assert {name: len(source) for name, source in (sources or {}).items()} == {"train": 2, "test": 1, "Mine": 1}


def test_a_file_that_is_missing_is_reported_when_it_is_read(tmp_path: Path) -> None:
    """So that the others are packed, and this one is named."""
    lay(tmp_path, "1.jpg")
    sources = find(write(tmp_path / "t.csv", path=["1.jpg", "2.jpg"], label=["a", "b"]))
    assert sources is not None
    assert sources[""].sizes.tolist() == [5, 0]
    with pytest.raises(FileNotFoundError):
        sources[""].read(1)


def test_other_files_and_folders_are_none(tmp_path: Path) -> None:
    lay(tmp_path, "cat.jpg")
    assert find(tmp_path) is None
    assert find(tmp_path / "cat.jpg") is None


@pytest.mark.parametrize("columns", [{"path": ["1.jpg"]}, {"label": [1]}, {"where": ["1.jpg"], "label": [1]}])
def test_a_table_without_paths_or_labels_is_refused_with_its_columns(tmp_path: Path, columns: dict[str, Any]) -> None:
    with pytest.raises(PackError, match=f"has the columns {', '.join(columns)}; it needs path and label"):
        find(write(tmp_path / "t.csv", **columns))


def test_a_path_of_something_else_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(PackError, match=r"t\.csv names b\.txt, which is no image or audio file"):
        find(write(tmp_path / "t.csv", path=["a.jpg", "b.txt"], label=[1, 2]))


def test_a_table_that_holds_the_samples_themselves_is_refused_with_the_remedy(tmp_path: Path) -> None:
    """As Hugging Face's hub has them."""
    path = write(tmp_path / "t.parquet", image=[{"bytes": b"x" * 9999, "path": "1.jpg"}], label=[1])
    with pytest.raises(PackError, match="save_to_disk") as error:
        find(path)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    "columns", [{"path": ["1.jpg", None], "label": [1, 2]}, {"path": ["1.jpg", "2.jpg"], "label": [1, None]}]
)
def test_rows_without_path_or_label_are_refused_with_their_number(
    tmp_path: Path, columns: dict[str, list[Any]]
) -> None:
    with pytest.raises(PackError, match="1 of 2 rows are empty in path or label"):
        find(write(tmp_path / "t.parquet", **columns))
    empty = {name: ["" if value is None else value for value in column] for name, column in columns.items()}
    with pytest.raises(PackError, match="1 of 2 rows are empty in path or label"):
        find(write(tmp_path / "t.csv", **empty))


def test_numbers_stay_as_they_are_written(tmp_path: Path) -> None:
    sources = find(write(tmp_path / "t.csv", path=["1.jpg", "2.jpg"], label=["007", "010"]))
    assert sources is not None
    assert sources[""].classes == ("007", "010")


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_what_is_no_table_is_refused_with_its_name(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"t.{ending}"
    for content in (b"", b"a,b\n1\n"):
        path.write_bytes(content)
        with pytest.raises(PackError, match=rf"cannot read .*t\.{ending}"):
            find(path)


def test_images_and_audio_files_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PackError, match="pack them one by one"):
        find(write(tmp_path / "t.csv", path=["a.jpg", "b.wav"], label=[1, 2]))
