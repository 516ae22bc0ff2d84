from __future__ import annotations

import json
import zlib
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.data.kinds import AUDIO, IMAGE, RAW
from unisono.data.pack import stripe
from unisono.data.pack.stripe import CHECKSUM, UNISONO, checksum, samples_of, schema, to_batch
from unisono.errors import PackError

Row = tuple[bytes, int, str]
ROWS = st.lists(st.tuples(st.binary(max_size=12), st.integers(0, 1 << 31), st.text(max_size=5)), min_size=1, max_size=6)
STRIPE = Path("pack/stripe-00007.arrow")


def batch_of(rows: list[Row]) -> tuple[pa.RecordBatch, dict[bytes, bytes]]:
    samples, labels, keys = (list(column) for column in zip(*rows, strict=True))
    return to_batch(schema(IMAGE, {}), samples, labels, keys)


def flipped(batch: pa.RecordBatch, column: int, buffer: int, place: int, mask: int) -> pa.RecordBatch:
    """The batch with a byte of one of its buffers changed, behind Arrow's back."""
    arrays = batch.columns
    array = arrays[column]
    buffers = [None if each is None else bytearray(each) for each in array.buffers()]
    whole = [None if each is None else pa.py_buffer(each) for each in buffers]
    arrays[column] = pa.Array.from_buffers(array.type, len(array), whole)
    made = pa.RecordBatch.from_arrays(arrays, schema=batch.schema)
    buffers[buffer][place] ^= mask
    return made


@settings(deadline=None)
@given(rows=ROWS)
def test_samples_come_back_as_they_were(rows: list[Row]) -> None:
    data, offsets = samples_of(STRIPE, 0, *batch_of(rows))
    assert len(data) == offsets[-1]
    assert [data[begin:end].tobytes() for begin, end in pairwise(offsets)] == [sample for sample, _, _ in rows]


@settings(deadline=None)
@given(rows=ROWS, choose=st.data())
def test_any_byte_that_is_changed_is_noticed(rows: list[Row], choose: st.DataObject) -> None:
    batch, beside = batch_of(rows)
    places = [
        (column, number)
        for column, array in enumerate(batch.columns)
        for number, buffer in enumerate(array.buffers())
        if buffer is not None and buffer.size
    ]
    column, buffer = choose.draw(st.sampled_from(places))
    place = choose.draw(st.integers(0, batch.column(column).buffers()[buffer].size - 1))
    changed = flipped(batch, column, buffer, place, choose.draw(st.integers(1, 255)))
    words = r"stripe-00007\.arrow is damaged: batch 5 has the checksum \w+, but \w+ was written; copy the pack again"
    with pytest.raises(PackError, match=words):
        samples_of(STRIPE, 5, changed, beside)


@settings(deadline=None)
@given(rows=ROWS, other=ROWS)
def test_other_rows_have_another_checksum(rows: list[Row], other: list[Row]) -> None:
    assert (checksum(batch_of(rows)[0]) == checksum(batch_of(other)[0])) == (rows == other)


def test_where_samples_begin_is_part_of_the_checksum() -> None:
    one, other = batch_of([(b"ab", 0, "x"), (b"c", 0, "y")]), batch_of([(b"a", 0, "x"), (b"bc", 0, "y")])
    assert one[1] != other[1]


@settings(deadline=None)
@given(rows=ROWS, choose=st.data())
def test_a_part_of_a_batch_has_the_checksum_of_its_rows(rows: list[Row], choose: st.DataObject) -> None:
    first = choose.draw(st.integers(0, len(rows) - 1))
    count = choose.draw(st.integers(1, len(rows) - first))
    part = batch_of(rows)[0].slice(first, count)
    assert checksum(part) == checksum(batch_of(rows[first : first + count])[0])


@pytest.mark.parametrize("beside", [None, {}, {CHECKSUM: b""}, {CHECKSUM: b"\xff\xfe"}])
def test_a_batch_without_a_checksum_is_damaged(beside: dict[bytes, bytes] | None) -> None:
    with pytest.raises(PackError, match="is damaged: batch 0 has the checksum"):
        samples_of(STRIPE, 0, batch_of([(b"a", 0, "x")])[0], beside)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "name"), [(IMAGE, "image"), (RAW, "image"), (AUDIO, "audio")])
def test_a_schema_names_its_columns_and_tells_what_the_pack_is(kind: str, name: str) -> None:
    made = schema(kind, {"classes": ["cat", "dog"]})
    assert (made.names, made.types) == ([name, "label", "key"], [pa.binary(), pa.int64(), pa.string()])
    assert json.loads(made.metadata[UNISONO]) == {"classes": ["cat", "dog"]}


@settings(deadline=None)
@given(data=st.binary(max_size=9000), begin=st.integers(0, (1 << 32) - 1))
def test_any_library_finds_the_checksum_that_zlib_does(data: bytes, begin: int) -> None:
    assert stripe.crc32(data, begin) == zlib.crc32(data, begin)
