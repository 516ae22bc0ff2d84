from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet
from tests.data.sources.text_corpus import texts_of

from unisono.errors import PackError


def test_rows_are_texts_in_a_file_and_in_a_folder(tmp_path: Path) -> None:
    for split in ("train", "test"):
        table = pa.table({"id": [1, 2, 3], "text": [f"{split}, a longer text: é", None, "b"]})
        parquet.write_table(table, tmp_path / f"{split}-00000-of-00001.parquet")
    assert texts_of(tmp_path) == {split: f"{split}, a longer text: é\0b\0".encode() for split in ("test", "train")}
    parts = texts_of(tmp_path / "train-00000-of-00001.parquet")
    assert list(parts) == ["train", "test"]


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_strings_of_any_layout_are_texts(tmp_path: Path, kind: pa.DataType) -> None:
    """Polars writes large ones, pandas categories."""
    parquet.write_table(pa.table({"text": pa.array(["abcdefghijklmnopqrs"]).cast(kind)}), tmp_path / "a.parquet")
    assert b"".join(texts_of(tmp_path).values()) == b"abcdefghijklmnopqrs\0"


def test_a_table_without_texts_is_refused_with_its_columns(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"text": [1], "id": [2]}), tmp_path / "a.parquet")
    with pytest.raises(PackError, match="has the columns text, id; it needs one of strings named 'text'"):
        texts_of(tmp_path)


def test_what_is_no_parquet_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("no")
    with pytest.raises(PackError, match=r"cannot read .*a\.parquet"):
        texts_of(tmp_path)
