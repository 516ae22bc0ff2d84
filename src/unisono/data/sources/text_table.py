"""Parquet files with a column "text", as data sets of texts on the Hugging Face hub have them.

train-00000-of-00002.parquet   train-00001-of-00002.parquet   test-00000-of-00001.parquet
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from unisono.data.sources.tabular import TEXT
from unisono.data.sources.text_windows import files_by_split, tokenised
from unisono.data.text.options import TextOptions
from unisono.data.text.windows import TokenStream
from unisono.errors import PackError

ENDINGS = (".parquet",)


def find(path: Path, options: TextOptions) -> dict[str, TokenStream] | None:
    """Return the tokens of each split of Parquet files; None if there are none."""
    return tokenised(files_by_split(path, ENDINGS, by_name=True), _texts, options)


def _texts(files: Sequence[Path]) -> Iterator[str]:
    """Yield the texts of all files, a batch of rows in memory at once; rows without a text are left out."""
    for file in files:
        try:
            table = parquet.ParquetFile(file)
            names = table.schema_arrow.names
            if TEXT not in names or not _is_text(table.schema_arrow.field(TEXT).type):
                raise PackError(f"{file} has the columns {', '.join(names)}; it needs one of strings named {TEXT!r}")
            for rows in table.iter_batches(columns=[TEXT]):
                yield from (text for text in rows.column(0).to_pylist() if text)
        except (pa.ArrowInvalid, OSError) as error:
            raise PackError(f"cannot read {file}: {str(error).splitlines()[0]}") from error


def _is_text(kind: pa.DataType) -> bool:
    """Return True for columns of strings, as Arrow, polars (large) and pandas (categories) write them."""
    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))
