from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from unisono.data.kinds import AUDIO, IMAGE, RAW, TEXT
from unisono.data.pack.packing import PackOptions, pack
from unisono.data.sources import Source
from unisono.data.sources import find as find_source
from unisono.data.sources.arrow import find
from unisono.errors import PackError

NAMES = ("dog", "cat", "ant")
SAMPLES = [b"\xff\xd8one", b"two", b"three"]
STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def write(path: Path, table: pa.Table, form: str = "stream", rows: int = 2) -> Path:
    """An Arrow file, in batches of a few rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = pa.ipc.new_stream if form == "stream" else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def table(samples: Sequence[bytes] = SAMPLES, labels: Sequence[Any] = (2, 0, 2), **names: str) -> pa.Table:
    return pa.table({names.get("sample", "image"): list(samples), names.get("label", "label"): list(labels)})


def as_saved(folder: Path, labels: list[int], names: tuple[str, ...] = NAMES, shards: int = 1) -> None:
    """A part as Hugging Face's `datasets` saves it."""
    for shard in range(shards):
        samples = [{"bytes": f"{shard} {row}".encode(), "path": None} for row in range(len(labels))]
        content = pa.table({"image": pa.array(samples, STRUCT), "label": pa.array(labels, pa.int64())})
        write(folder / f"data-{shard:05d}-of-{shards:05d}.arrow", content)
    features = {"image": {"_type": "Image"}, "label": {"names": list(names), "_type": "ClassLabel"}}
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))


@pytest.mark.parametrize("form", ["stream", "file"])
def test_both_forms_of_arrow_files_are_read(tmp_path: Path, form: str) -> None:
    sources = find(write(tmp_path / "a.arrow", table(), form))
    assert sources is not None
    assert list(sources) == [""]
    source = sources[""]
    assert source.kind == IMAGE
    assert source.classes == ("0", "2")
    assert source.labels.tolist() == [1, 0, 1]
    assert source.sizes.tolist() == [5, 3, 5]
    assert [source.read(index) for index in range(3)] == SAMPLES
    assert len(set(source.keys)) == 3


def test_a_data_set_as_it_was_saved_is_read_with_the_names_of_its_classes(tmp_path: Path) -> None:
    as_saved(tmp_path / "train", [2, 0, 1], shards=2)
    as_saved(tmp_path / "test", [1])
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    sources = find(tmp_path)
    assert sources is not None
    assert sorted(sources) == ["test", "train"]
    train = sources["train"]
    assert train.classes == sources["test"].classes == NAMES
    assert train.labels.tolist() == [2, 0, 1, 2, 0, 1]
    assert [train.read(index) for index in range(6)] == [
        f"{shard} {row}".encode() for shard in (0, 1) for row in range(3)
    ]
    assert train.sizes.tolist() == [3] * 6


def test_parts_of_any_name_are_parts_where_the_data_set_says_it_has_some(tmp_path: Path) -> None:
    as_saved(tmp_path / "fold 1", [0])
    assert find(tmp_path) is None
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["fold 1"]}')
    sources = find(tmp_path)
    assert sources is not None
    assert list(sources) == ["fold 1"]


def test_names_of_splits_may_have_capitals(tmp_path: Path) -> None:
    as_saved(tmp_path / "Train", [2, 0])
    as_saved(tmp_path / "Test", [1])
    assert sorted(find(tmp_path) or ()) == ["test", "train"]


def test_two_folders_of_one_split_are_refused(tmp_path: Path) -> None:
    as_saved(tmp_path / "Train", [2, 0])
    as_saved(tmp_path / "train", [1])
    with pytest.raises(PackError, match="two folders of one split among Train, train"):
        find(tmp_path)


def test_one_part_can_be_named(tmp_path: Path) -> None:
    as_saved(tmp_path / "train", [2, 0, 1])
    sources = find(tmp_path / "train")
    assert sources is not None
    assert list(sources) == [""]
    assert sources[""].classes == NAMES


@pytest.mark.parametrize("label", ["label", "labels", "fine_label"])
def test_labels_have_one_of_three_names(tmp_path: Path, label: str) -> None:
    sources = find(write(tmp_path / "a.arrow", table(label=label)))
    assert sources is not None
    assert sources[""].labels.tolist() == [1, 0, 1]


def test_labels_can_be_words(tmp_path: Path) -> None:
    sources = find(write(tmp_path / "a.arrow", table(labels=["b", "a", "b"])))
    assert sources is not None
    assert sources[""].classes == ("a", "b")
    assert sources[""].labels.tolist() == [1, 0, 1]


def test_names_of_classes_can_lie_in_the_metadata_of_the_columns(tmp_path: Path) -> None:
    """As `datasets` writes them into its cache."""
    info = {"info": {"features": {"label": {"names": list(NAMES), "_type": "ClassLabel"}}}}
    sources = find(write(tmp_path / "a.arrow", table().replace_schema_metadata({"huggingface": json.dumps(info)})))
    assert sources is not None
    assert sources[""].classes == NAMES
    assert sources[""].labels.tolist() == [2, 0, 2]


def of_pack(kind: str, classes: Sequence[str], shape: tuple[int, ...] | None = None) -> pa.Table:
    """As in a stripe of a pack."""
    about = {"classes": classes, "kind": kind, "shape": shape}
    return table(labels=[1, 0, 1]).replace_schema_metadata({"unisono": json.dumps(about)})


def test_files_that_number_their_classes_otherwise_are_renumbered_by_names(tmp_path: Path) -> None:
    for name, classes in (("a", ["cat", "dog"]), ("b", ["ant", "cat"]), ("c", ["dog", "cat"])):
        write(tmp_path / f"{name}.arrow", of_pack(RAW, classes, (2, 2)))
    sources = find(tmp_path)
    assert sources is not None
    source = sources[""]
    assert (source.kind, source.classes, source.shape) == (RAW, ("ant", "cat", "dog"), (2, 2))
    assert [source.classes[label] for label in source.labels] == [
        *("dog", "cat", "dog"),
        *("cat", "ant", "cat"),
        *("cat", "dog", "cat"),
    ]
    features = {"label": {"names": list(NAMES), "_type": "ClassLabel"}}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"features": features}))
    sources = find(tmp_path)
    assert sources is not None
    assert sources[""].classes == NAMES, "names beside the files are those of all"
    assert sources[""].labels.tolist() == [1, 0, 1] * 3


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            of_pack(RAW, NAMES, (4, 16)),
            r"b\.arrow has raw samples of 4 x 16 in named classes, but .*a\.arrow has raw sam",
        ),
        (
            of_pack(AUDIO, NAMES),
            r"b\.arrow has audio samples in named classes, but .*a\.arrow has raw samples of 8 x 8 ",
        ),
        (table(), r"b\.arrow has any samples in numbered classes, but .*; pack each from a folder of its own"),
    ],
    ids=["shape", "kind", "names"],
)
def test_files_of_different_samples_are_refused(tmp_path: Path, other: pa.Table, message: str) -> None:
    write(tmp_path / "a.arrow", of_pack(RAW, NAMES, (8, 8)))
    write(tmp_path / "b.arrow", other)
    with pytest.raises(PackError, match=message):
        find(tmp_path)


def test_texts_of_several_vocabularies_are_refused(tmp_path: Path) -> None:
    """Their samples are numbers of tokens, which nothing renumbers."""
    write(tmp_path / "train/a.arrow", of_pack(TEXT, NAMES, (9,)))
    write(tmp_path / "train/b.arrow", of_pack(TEXT, NAMES[:2], (9,)))
    message = "text have several vocabularies; pack texts with the same --tokenizer, or pack them one by one"
    with pytest.raises(PackError, match=message):
        find(tmp_path / "train")
    (tmp_path / "test").mkdir()
    (tmp_path / "train/b.arrow").rename(tmp_path / "test/b.arrow")
    with pytest.raises(PackError, match=message):
        find_source(tmp_path)


def test_the_data_set_says_which_files_it_has(tmp_path: Path) -> None:
    as_saved(tmp_path, [2, 0, 1])
    write(tmp_path / "older.arrow", table())
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    sources = find(tmp_path)
    assert sources is not None
    assert len(sources[""]) == 3


def test_what_was_kept_from_earlier_work_is_left_out(tmp_path: Path) -> None:
    as_saved(tmp_path, [2, 0, 1])
    write(tmp_path / "cache-0123456789abcdef.arrow", table())
    sources = find(tmp_path)
    assert sources is not None
    assert len(sources[""]) == 3


def test_a_pack_can_be_packed_again(tmp_path: Path) -> None:
    """With all its classes, though one may have no sample."""
    sizes, labels = np.full(3, 4, np.int64), np.array([2, 0, 2])
    source = Source(RAW, NAMES, ["a", "b", "c"], labels, sizes, [b"1234", b"5678", b"9012"].__getitem__, (2, 2))
    pack(source, tmp_path / "pack", PackOptions(stripes=2), 1, lambda: None)
    sources = find(tmp_path / "pack")
    assert sources is not None
    again = sources[""]
    assert (again.kind, again.classes, again.shape) == (RAW, NAMES, (2, 2))
    assert again.labels.tolist() == [2, 0, 2]
    assert [again.read(index) for index in range(3)] == [b"1234", b"5678", b"9012"]


def test_large_binary_columns_are_read(tmp_path: Path) -> None:
    content = pa.table({"x": pa.array(SAMPLES, pa.large_binary()), "label": [2, 0, 2]})
    sources = find(write(tmp_path / "a.arrow", content))
    assert sources is not None
    assert sources[""].sizes.tolist() == [5, 3, 5]
    assert sources[""].read(2) == b"three"


def test_audio_files_are_known_by_their_first_bytes(tmp_path: Path) -> None:
    sources = find(write(tmp_path / "a.arrow", table([b"RIFF....WAVE", b"RIFF", b"RIFF"], sample="audio")))
    assert sources is not None
    assert sources[""].kind == AUDIO


def test_a_part_without_samples_is_empty(tmp_path: Path) -> None:
    as_saved(tmp_path, [])
    sources = find(tmp_path)
    assert sources is not None
    assert len(sources[""]) == 0


def test_other_files_and_folders_are_none(tmp_path: Path) -> None:
    assert find(tmp_path) is None
    (tmp_path / "cat.jpg").write_bytes(b"x")
    (tmp_path / "index.arrow").write_bytes(b"x")
    assert find(tmp_path) is None
    assert find(tmp_path / "cat.jpg") is None


@pytest.mark.parametrize(
    "columns", [{"image": SAMPLES, "size": [1, 2, 3]}, {"text": ["a", "b", "c"], "label": [1, 2, 3]}]
)
def test_a_table_without_samples_or_labels_is_refused_with_its_columns(tmp_path: Path, columns: dict[str, Any]) -> None:
    with pytest.raises(PackError, match=f"has the columns {', '.join(columns)}; one of bytes and a label are needed"):
        find(write(tmp_path / "a.arrow", pa.table(columns)))


def test_samples_that_are_mere_paths_are_refused_with_their_number(tmp_path: Path) -> None:
    samples = [{"bytes": None, "path": "a.jpg"}, {"bytes": b"x", "path": None}, {"bytes": None, "path": "b.jpg"}]
    content = pa.table({"image": pa.array(samples, STRUCT), "label": [0, 1, 2]})
    with pytest.raises(PackError, match="2 of 3 samples in 'image' are empty or only paths"):
        find(write(tmp_path / "a.arrow", content))


@pytest.mark.parametrize("labels", [[0, None, 1], ["a", None, "b"], [0.0, float("nan"), 1.0]])
def test_labels_that_are_missing_are_refused_with_their_number(tmp_path: Path, labels: list[Any]) -> None:
    with pytest.raises(PackError, match="1 of 3 samples have no label"):
        find(write(tmp_path / "a.arrow", table(labels=labels)))


def test_several_labels_a_sample_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PackError, match=r"'label' has several labels a sample \(list.*\); keep one, a"):
        find(write(tmp_path / "a.arrow", table(labels=[[0, 1], [2], [0, 1]])))


@pytest.mark.parametrize("labels", [[-1, 2, -1], [0, 3, -1]])
def test_labels_of_no_class_are_refused_with_their_number(tmp_path: Path, labels: list[int]) -> None:
    """Data sets whose in the test set labels are kept secret are saved with -1 for each."""
    as_saved(tmp_path, labels)
    with pytest.raises(PackError, match="2 of 3 samples have no label"):
        find(tmp_path)


@pytest.mark.parametrize("form", ["stream", "file"])
@pytest.mark.parametrize("share", [0, 0.02, 0.3, 0.6, 0.9])
def test_a_file_that_is_not_all_there_is_refused_with_its_name(tmp_path: Path, form: str, share: float) -> None:
    path = write(tmp_path / "a.arrow", table(SAMPLES * 50, [1, 2, 3] * 50), form, rows=30)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(PackError, match=r"a\.arrow is no Arrow file, or incomplete"):
        find(path)


def test_a_file_of_something_else_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.arrow").write_bytes(b"these are words, and no table at all")
    with pytest.raises(PackError, match=r"a\.arrow is no Arrow file"):
        find(tmp_path)


def test_a_file_that_is_missing_is_refused_with_its_name(tmp_path: Path) -> None:
    as_saved(tmp_path, [2, 0, 1], shards=2)
    files = [{"filename": file.name} for file in sorted(tmp_path.glob("*.arrow"))]
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": files}))
    (tmp_path / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(PackError, match=r"data-00001-of-00002\.arrow is no Arrow file, or incomplete"):
        find(tmp_path)


@pytest.mark.parametrize("name", ["dataset_info.json", "state.json"])
def test_notes_that_cannot_be_read_are_refused_with_their_name(tmp_path: Path, name: str) -> None:
    as_saved(tmp_path, [2, 0, 1])
    for content in ('{"features": ', "[" * 100_000, "[]"):
        (tmp_path / name).write_text(content)
        with pytest.raises(PackError, match=f"{name} is no JSON object, or incomplete"):
            find(tmp_path)


@pytest.mark.parametrize("content", ["{}", '{"_data_files": [1]}'])
def test_a_state_without_files_is_refused(tmp_path: Path, content: str) -> None:
    as_saved(tmp_path, [2, 0, 1])
    (tmp_path / "state.json").write_text(content)
    with pytest.raises(PackError, match=r"state\.json lists no _data_files; "):
        find(tmp_path)


def test_files_of_different_tables_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.arrow", table())
    write(tmp_path / "b.arrow", table(label="labels"))
    with pytest.raises(PackError, match="have different columns"):
        find(tmp_path)


def test_files_without_rows_or_with_labels_in_words_need_no_names(tmp_path: Path) -> None:
    write(tmp_path / "numbers" / "a.arrow", of_pack(RAW, NAMES, (2, 2)))
    write(tmp_path / "numbers" / "b.arrow", table([], []).cast(table().schema))
    sources = find(tmp_path / "numbers")
    assert sources is not None
    assert sources[""].labels.tolist() == [1, 0, 1]
    about = {"huggingface": json.dumps({"info": {"features": {"label": {"names": ["a", "b"]}}}})}
    write(tmp_path / "words" / "a.arrow", table(labels="aba").replace_schema_metadata(about))
    write(tmp_path / "words" / "b.arrow", table(labels="bcb"))
    sources = find(tmp_path / "words")
    assert sources is not None
    assert [sources[""].classes[label] for label in sources[""].labels] == list("ababcb")


def test_names_in_some_files_alone_are_refused_with_the_remedy(tmp_path: Path) -> None:
    about = {"huggingface": json.dumps({"info": {"features": {"label": {"names": list(NAMES)}}}})}
    write(tmp_path / "a.arrow", table(labels=[1, 0, 1]).replace_schema_metadata(about))
    write(tmp_path / "b.arrow", table(labels=[1, 0, 1]))
    with pytest.raises(PackError, match=r"put the names of all classes into .*dataset_info\.json"):
        find(tmp_path)
