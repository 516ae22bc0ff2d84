"""Tables of paths and labels: CSV, TSV or Parquet.

The columns are "path" (or "file", "filename", "image", "audio") and "label" (or "labels", "class"). Paths are relative
to the table's own folder. A column "split" (train, test, ...) divides the data set into splits.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from pyarrow import csv, parquet

from unisono.data.sources import FILE_KINDS, Source, Splits, kind_of, labelled_source, reading, split_of
from unisono.errors import PackError

PATHS = ("path", "file", "filename", "image", "audio")
LABELS = ("label", "class", "labels")
SPLIT = "split"
TEXT_COLUMN = "text"
"""Column of a Parquet file of texts, which `texts.py` reads."""
TABLES = {".csv": ",", ".tsv": "\t", ".parquet": None}


def find(path: Path) -> Splits | None:
    """Return the splits of a table; None if `path` is no table."""
    if not path.is_file() or path.suffix not in TABLES:
        return None
    table = _open(path)
    names = set(table.schema.names)
    at, label = (next((name for name in wanted if name in names), None) for wanted in (PATHS, LABELS))
    if at is None and path.suffix == ".parquet" and TEXT_COLUMN in names:
        return None
    if at is None or label is None:
        raise PackError(f"{path} has the columns {', '.join(table.schema.names)}; it needs path and label")
    if pa.types.is_nested(table[at].type) or pa.types.is_binary(table[at].type):
        raise PackError(
            f"{path} holds samples in {at!r}, not their paths; load it with Hugging Face's datasets, and pack what "
            "save_to_disk writes"
        )
    used = [at, label, *({SPLIT} & names)]
    missing = len(table) - len(table.select(used).drop_null())
    if missing:
        raise PackError(f"{path}: {missing} of {len(table)} rows are empty in {' or '.join(used)}")
    files = [str(name) for name in table[at].to_pylist()]
    labels = [str(name) for name in table[label].to_pylist()]
    splits = [str(name) for name in table[SPLIT].to_pylist()] if SPLIT in names else [""] * len(files)
    splits = [split_of([name]) or name for name in splits]
    strange = next((name for name in splits if name != Path(name).name), None)
    if strange:
        raise PackError(f"{path} names a split {strange!r}, which cannot be a folder name")
    unknown = [name for name in files if kind_of(name) is None]
    if unknown:
        raise PackError(f"{path} names {unknown[0]}, which is no {FILE_KINDS} file of a known format")
    rows = {split: [row for row, name in enumerate(splits) if name == split] for split in dict.fromkeys(splits)}
    return {
        split: _source([files[row] for row in own], [labels[row] for row in own], path) for split, own in rows.items()
    }


def _source(files: list[str], labels: list[str], path: Path) -> Source:
    paths = [path.parent / name for name in files]
    sizes = [file.stat().st_size if file.is_file() else 0 for file in paths]
    return labelled_source(files, labels, sizes, lambda number: paths[number].read_bytes(), path, paths)


def _open(path: Path) -> pa.Table:
    with reading(path, pa.ArrowInvalid):
        if path.suffix == ".parquet":
            return parquet.read_table(path)
        words = dict.fromkeys((*PATHS, *LABELS, SPLIT), pa.string())
        columns = csv.ConvertOptions(strings_can_be_null=True, null_values=[""], column_types=words)
        return csv.read_csv(path, None, csv.ParseOptions(delimiter=TABLES[path.suffix]), columns)
