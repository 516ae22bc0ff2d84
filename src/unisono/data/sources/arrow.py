"""Arrow data sets on disk, as saved by Hugging Face's `datasets`, or any Arrow files with samples and labels.

    dataset_dict.json      train/  test/  ...          splits
    dataset_info.json      data-00000-of-00002.arrow   features (names of classes), and tables

Samples are in the first column of bytes, or of {bytes, path}; labels are in "label", "labels" or "fine_label".
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute

from unisono.data.kinds import IMAGE, kind_of_content
from unisono.data.sources import Source, Splits, common_classes, number_classes, split_of
from unisono.errors import PackError

LABELS = ("label", "labels", "fine_label")


def find(path: Path) -> Splits | None:
    """Return the splits of an Arrow data set; None if `path` is none."""
    if not path.is_dir():
        return {"": _read([path], path)} if path.suffix == ".arrow" else None
    folders = sorted(folder for folder in path.iterdir() if folder.is_dir())
    splits = {folder.name: folder for folder in folders if any(folder.glob("*.arrow"))}
    if splits and ((path / "dataset_dict.json").exists() or all(split_of([name]) for name in splits)):
        named = {split_of([name]) or name: folder for name, folder in splits.items()}
        if len(named) < len(splits):
            raise PackError(f"{path} has two folders of one split among {', '.join(splits)}; remove or rename one")
        return {name: _read(_tables(folder), folder) for name, folder in named.items()}
    return {"": _read(tables, path)} if (tables := _tables(path)) else None


def _tables(folder: Path) -> list[Path]:
    """Return the data set's own files, without those that were computed from them."""
    state = folder / "state.json"
    if state.is_file():
        try:
            return [folder / entry["filename"] for entry in _json(state)["_data_files"]]
        except (LookupError, TypeError) as error:
            raise PackError(f"{state} lists no _data_files; save the data set again, or remove it") from error
    found = [file for file in sorted(folder.glob("*.arrow")) if file.name != "index.arrow"]
    return [file for file in found if not file.name.startswith("cache-")]


def _read(files: list[Path], where: Path) -> Source:
    tables = [_open(file) for file in files]
    try:
        table = pa.concat_tables(tables)
    except pa.ArrowInvalid as error:
        raise PackError(f"the files of {where} have different columns: {str(error).splitlines()[0]}") from error
    column = next((field.name for field in table.schema if _holds_bytes(field.type)), None)
    label = next((name for name in LABELS if name in table.schema.names), None)
    if column is None or label is None:
        raise PackError(f"{where} has the columns {', '.join(table.schema.names)}; one of bytes and a label are needed")
    if pa.types.is_nested(table[label].type):
        raise PackError(
            f"{where}: {label!r} has several labels a sample ({table[label].type}); keep one, a number or a name"
        )
    samples = table[column]
    if pa.types.is_struct(samples.type):
        samples = compute.struct_field(samples, "bytes")
    if samples.null_count:
        raise PackError(
            f"{where}: {samples.null_count} of {len(samples)} samples in {column!r} are empty or only paths"
        )
    path = where / "dataset_info.json"
    beside = _json(path) if path.is_file() else {}
    filled = [place for place, each in enumerate(tables) if each.num_rows] or [0]  # an empty file describes nothing
    files_of_samples, tables = [files[place] for place in filled], [tables[place] for place in filled]
    numbered = pa.types.is_integer(table[label].type)
    described = [_describe(beside, each.schema, label, numbered) for each in tables]
    (kind, shape, names), form = described[0], str(described[0])
    for file, each in zip(files_of_samples, described, strict=True):
        if str(each) != form:
            alike = (each.kind, each.shape) == (kind, shape)
            remedy = f"put the names of all classes into {path}" if alike else "pack each from a folder of its own"
            raise PackError(f"{file} has {each}, but {files_of_samples[0]} has {form}; {remedy}")
    if names:
        classes, numbers = common_classes([each.names for each in described], [kind or IMAGE])
        labels = np.concatenate([_renumbered(each[label], new) for each, new in zip(tables, numbers, strict=True)])
        missing = int((labels < 0).sum())
    else:
        classes, labels = number_classes([str(value) for value in table[label].to_pylist()])
        missing = compute.is_null(table[label], nan_is_null=True).to_pylist().count(True)
    if missing:
        raise PackError(
            f"{where}: {missing} of {len(labels)} samples have no label; pack the splits that have labels one by one"
        )
    sizes = compute.binary_length(samples).to_numpy().astype(np.int64)
    keys = [f"{where.name}/{number}" for number in range(len(labels))]
    kind = kind or kind_of_content(samples[0].as_py() if len(samples) else b"")
    return Source(kind, classes, keys, labels, sizes, lambda row: bytes(samples[row].as_py()), shape or None, files)


def _open(path: Path) -> pa.Table:
    for opened in (pa.ipc.open_stream, pa.ipc.open_file):
        with suppress(pa.ArrowInvalid, OSError):
            return opened(pa.memory_map(str(path))).read_all()
    raise PackError(f"{path} is no Arrow file, or incomplete")


def _holds_bytes(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(field.name == "bytes" for field in kind)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


class Description(NamedTuple):
    """Description of a file's samples and labels in its metadata: empty where it does not say."""

    kind: str
    shape: tuple[int, ...]
    names: tuple[str, ...]
    """Names of the classes, which labels are numbers of."""

    def __str__(self) -> str:
        shape = f" of {' x '.join(map(str, self.shape))}" if self.shape else ""
        return f"{self.kind or 'any'} samples{shape} in {'named' if self.names else 'numbered'} classes"


def _describe(beside: dict[str, Any], columns: pa.Schema, label: str, numbered: bool) -> Description:
    """Return the description of a file with these columns; names in the file `beside` it are those of all, and labels
    that are not numbers need none."""
    metadata = columns.metadata or {}
    own, inside = (json.loads(metadata.get(key, b"{}")) for key in (b"unisono", b"huggingface"))
    features: dict[str, Any] = beside.get("features") or inside.get("info", {}).get("features") or {}
    names = features.get(label, {}).get("names") or own.get("classes", ()) if numbered else ()
    return Description(own.get("kind", ""), tuple(own.get("shape") or ()), tuple(names))


def _renumbered(labels: pa.ChunkedArray, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the new numbers of the labels of a file, int64; -1 for those that have none."""
    given = labels.cast(pa.int64()).fill_null(-1).to_numpy()
    known = (given >= 0) & (given < len(numbers))
    return np.where(known, numbers[given * known], -1)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise PackError(f"{path} is no JSON object, or incomplete: {error}") from error
    if not isinstance(content, dict):
        raise PackError(f"{path} is no JSON object, or incomplete: it holds a {type(content).__name__}")
    return content
