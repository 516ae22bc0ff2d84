from __future__ import annotations

import io
import json
import shutil
import wave
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.data.kinds import AUDIO, IMAGE, RAW
from unisono.data.pack import index, packing, stripe
from unisono.data.pack.index import CHECKSUM, ORIGIN, UNISONO, Index, checksum, read_index, schema, to_batch
from unisono.data.pack.packing import PackOptions, StripeWriter, WrittenStripe, fingerprints, pack, remove_notes
from unisono.data.pack.stripe import read_samples, read_stretch, samples_of
from unisono.data.sources import Source
from unisono.errors import DecodeError, PackError

SAMPLES, STRIPES = 40, 3


def sound(content: bytes) -> bytes:
    """A wav file."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, 8_000, 0, "NONE", ""))
        file.writeframes(content)
    return out.getvalue()


def source_of(files: Sequence[bytes]) -> Source:
    """Recordings of two classes, one after the other."""
    keys, labels = [f"{position}.wav" for position in range(len(files))], np.arange(len(files)) % 2
    sizes = np.array([len(file) for file in files], np.int64)
    return Source(AUDIO, ("no", "yes"), keys, labels, sizes, lambda position: files[position])


def files_of(count: int) -> list[bytes]:
    rng = np.random.default_rng(5)
    return [sound(rng.bytes(2 * int(rng.integers(1, 100)))) for _ in range(count)]


FILES = files_of(SAMPLES)


@pytest.fixture(scope="module", autouse=True)
def small_batches() -> Iterator[None]:
    """Batches of a few samples, so that stripes have several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "BATCH_BYTES", 600)
        yield


@pytest.fixture(scope="module")
def packed(small_batches: None, tmp_path_factory: pytest.TempPathFactory) -> Index:
    """A pack that nobody changes."""
    folder = tmp_path_factory.mktemp("packed") / "pack"
    return pack(source_of(FILES), folder, PackOptions(stripes=STRIPES), 1, lambda: None)


@pytest.fixture
def own(packed: Index, tmp_path: Path) -> Index:
    """A pack of one's own."""
    return read_index(shutil.copytree(packed.folder, tmp_path / "pack"))


@pytest.fixture(scope="module")
def spare(packed: Index, tmp_path_factory: pytest.TempPathFactory) -> Index:
    """A pack that is changed and mended again."""
    return read_index(shutil.copytree(packed.folder, tmp_path_factory.mktemp("spare") / "pack"))


def read(index: Index, first: int, last: int) -> list[bytes]:
    """Samples, each by itself."""
    return [
        data[begin:end].tobytes()
        for data, offsets in read_stretch(index, first, last)
        for begin, end in pairwise(offsets)
    ]


@given(st.sets(st.integers(0, SAMPLES - 1)))
def test_any_samples_are_read_each_batch_once(packed: Index, wanted: set[int]) -> None:
    numbers, batches = np.array(sorted(wanted), np.int32), list[object]()
    with pytest.MonkeyPatch.context() as patch:
        reads = stripe.StripeFile.samples
        patch.setattr(stripe.StripeFile, "samples", lambda self, batch: (batches.append(batch), reads(self, batch))[1])
        contents = [sample.tobytes() for stretch in read_samples(packed, numbers) for sample in stretch.each()]
    assert contents == [FILES[position] for position in sorted(wanted)]
    assert len(batches) == len({(packed.stripe[position], packed.batch[position]) for position in wanted})


def path_of(index: Index, stripe_index: int) -> Path:
    return index.folder / index.about.stripes[stripe_index][0]


def content_of(path: Path) -> list[int]:
    """The places in a file of all bytes that columns have: samples, labels, keys and where each begins."""
    with pa.memory_map(str(path)) as file:
        begin = file.read_buffer().address
        reader = pa.ipc.open_file(file)
        batches = [reader.get_batch(batch_index) for batch_index in range(reader.num_record_batches)]
        buffers = [buffer for batch in batches for column in batch.columns for buffer in column.buffers() if buffer]
        return [buffer.address - begin + place for buffer in buffers for place in range(buffer.size)]


def test_a_pack_has_several_stripes_of_several_batches(packed: Index) -> None:
    assert np.unique(packed.stripe).tolist() == [0, 1, 2]
    assert all(packed.batch[packed.stripe == stripe_index].max() >= 2 for stripe_index in range(STRIPES))
    assert packed.length.tolist() == [len(file) for file in FILES]
    assert packed.label.tolist() == [position % 2 for position in range(SAMPLES)]


@given(choose=st.data())
def test_a_stretch_has_exactly_its_samples(packed: Index, choose: st.DataObject) -> None:
    first = choose.draw(st.integers(0, SAMPLES))
    last = choose.draw(st.integers(first, SAMPLES))
    assert read(packed, first, last) == FILES[first:last]


def test_a_stretch_opens_no_stripe_that_it_does_not_need(own: Index) -> None:
    path_of(own, 0).unlink()
    path_of(own, 2).unlink()
    first, last = np.flatnonzero(own.stripe == 1)[[0, -1]].tolist()
    assert read(own, first, last + 1) == FILES[first : last + 1]
    with pytest.raises(PackError):
        read(own, first - 1, last)


def test_samples_that_were_read_outlive_the_file(own: Index) -> None:
    (data, _), *_ = read_stretch(own, 0, 1)
    with path_of(own, 0).open("r+b") as file:
        file.write(bytes(own.about.stripes[0][1]))
    assert data.tobytes() == FILES[0]


@given(choose=st.data())
def test_any_flipped_byte_of_samples_labels_and_keys_is_noticed(spare: Index, choose: st.DataObject) -> None:
    path = path_of(spare, 1)
    content = path.read_bytes()
    place = choose.draw(st.sampled_from(content_of(path)))
    harmed = bytearray(content)
    harmed[place] ^= choose.draw(st.integers(1, 255))
    path.write_bytes(harmed)
    try:
        with pytest.raises(PackError, match=r"stripe-00001\.arrow is damaged"):
            read(spare, 0, SAMPLES)
    finally:
        path.write_bytes(content)


@given(choose=st.data())
def test_any_flipped_byte_at_all_is_noticed_or_changes_no_sample(spare: Index, choose: st.DataObject) -> None:
    path = path_of(spare, 1)
    content = path.read_bytes()
    harmed = bytearray(content)
    harmed[choose.draw(st.integers(0, len(content) - 1))] ^= choose.draw(st.integers(1, 255))
    path.write_bytes(harmed)
    try:
        contents = read(spare, 0, SAMPLES)
    except PackError as error:
        assert "stripe-00001.arrow" in str(error)
    else:
        assert contents == FILES
    finally:
        path.write_bytes(content)


def missing(path: Path) -> None:
    path.unlink()


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


def shorter(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def misnamed(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"label", b"\xecabel"))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (missing, r"pack is incomplete: stripe-00001\.arrow is missing"),
        (longer, r"stripe-00001\.arrow has \d+ bytes, but \d+ were written"),
        (shorter, r"stripe-00001\.arrow has \d+ bytes, but \d+ were written"),
        (empty, r"stripe-00001\.arrow has 0 bytes, but \d+ were written"),
        (zeros, r"stripe-00001\.arrow is damaged: .*; copy the pack again"),
        (misnamed, r"stripe-00001\.arrow is damaged: .*; copy the pack again"),
    ],
)
def test_a_stripe_that_is_not_as_it_was_written_is_reported(
    own: Index, harm: Callable[[Path], None], message: str
) -> None:
    harm(path_of(own, 1))
    with pytest.raises(PackError, match=message):
        read(own, 0, SAMPLES)


@pytest.mark.parametrize("column", ["length", "row", "batch"])
def test_a_stripe_of_another_pack_is_reported(packed: Index, column: str) -> None:
    strange = replace(packed, **{column: getattr(packed, column) + 100})
    with pytest.raises(PackError, match=r"stripe-00000\.arrow: batch \d+ is not what the index says"):
        read(strange, 0, SAMPLES)


def of_pixels(pixels: int, folder: Path) -> Index:
    """A pack of two stripes that differs from those of other pixels in nothing else."""
    samples, file = [bytes([place, pixels]) for place in range(8)], folder / f"{pixels}.idx"
    file.touch()
    source = replace(source_of(samples), kind=RAW, shape=(1, 2), files=[file])
    return pack(source, folder / f"pack-{pixels}", PackOptions(stripes=2), 1, lambda: None)


def test_a_stripe_in_the_place_of_another_of_its_size_and_labels_is_reported(tmp_path: Path) -> None:
    packed, other = of_pixels(0, tmp_path), of_pixels(1, tmp_path)
    for wrong in (path_of(other, 0), path_of(packed, 1)):
        shutil.copy(wrong, path_of(packed, 0))
        with pytest.raises(
            PackError, match=r"stripe-00000\.arrow is another stripe, or of another pack; copy the pack"
        ):
            read(packed, 0, 8)


def test_a_stripe_of_an_older_release_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "schema", lambda *about: schema(*about).remove_metadata())
    assert read(of_pixels(3, tmp_path), 0, 2) == [b"\0\3", b"\1\3"]


def test_a_stripe_of_other_columns_is_reported(own: Index) -> None:
    path = path_of(own, 0)
    table = pa.table({"label": [1], "image": [b"a"], "key": ["a"]})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    files = ((path.name, path.stat().st_size), *own.about.stripes[1:])
    with pytest.raises(PackError, match=r"stripe-00000\.arrow is no stripe of a pack"):
        read(replace(own, about=replace(own.about, stripes=files)), 0, SAMPLES)


def finished(folder: Path, stripe_index: int, fingerprint: str) -> WrittenStripe | None:
    return StripeWriter(source_of(FILES), folder, fingerprint, lambda sample: sample, lambda: None).finished(
        stripe_index
    )


def test_a_finished_stripe_is_known_by_its_note(tmp_path: Path) -> None:
    def make() -> WrittenStripe:
        return StripeWriter(source_of(FILES), tmp_path, "mark", lambda sample: sample, lambda: None).write(4, 3, 9)

    assert finished(tmp_path, 4, "mark") is None
    done = make()
    assert finished(tmp_path, 4, "mark") == done
    assert (finished(tmp_path, 4, "another"), finished(tmp_path, 3, "mark")) == (None, None)
    path, note = tmp_path / "stripe-00004.arrow", tmp_path / "stripe-00004.json"
    assert fingerprints(tmp_path) == {"mark"}
    make()
    for harm in (missing, longer, empty):
        harm(path)
        assert finished(tmp_path, 4, "mark") is None
        make()
    note.write_text(note.read_text()[:-5])
    assert finished(tmp_path, 4, "mark") is None
    make()
    remove_notes(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["stripe-00004.arrow"]


def test_samples_that_cannot_be_encoded_are_skipped_and_counted(tmp_path: Path) -> None:
    def make(sample: bytes) -> bytes:
        if sample in (FILES[4], FILES[6]):
            raise DecodeError("it is ugly")
        if sample == FILES[5]:
            raise FileNotFoundError(2, "No such file or directory", "5.wav")
        return sample

    calls: list[None] = []
    done = StripeWriter(source_of(FILES), tmp_path, "mark", make, lambda: calls.append(None)).write(0, 3, 8)
    assert done.skipped == (("4.wav", "it is ugly"), ("5.wav", "No such file or directory"), ("6.wav", "it is ugly"))
    assert (done.lengths, done.labels, done.batches[-1]) == ((len(FILES[3]), len(FILES[7])), (1, 1), 2)
    assert len(calls) == 5
    assert finished(tmp_path, 0, "mark") == done


def test_a_stripe_of_nothing_but_broken_samples_is_a_note_alone(tmp_path: Path) -> None:
    def make(sample: bytes) -> bytes:
        raise DecodeError("it is ugly")

    done = StripeWriter(source_of(FILES), tmp_path, "mark", make, lambda: None).write(0, 0, 2)
    assert (done.nbytes, len(done.skipped)) == (0, 2)
    assert [each.name for each in tmp_path.iterdir()] == ["stripe-00000.json"]
    assert finished(tmp_path, 0, "mark") == done


def test_batches_stay_small_and_a_large_sample_has_one_alone(tmp_path: Path) -> None:
    files = [bytes(length) for length in (100, 500, 1, 599, 2_000, 3)]
    done = StripeWriter(source_of(files), tmp_path, "mark", lambda sample: sample, lambda: None).write(0, 0, 6)
    assert done.batches == (2, 4, 5, 6)
    with pa.OSFile(str(tmp_path / "stripe-00000.arrow")) as file:
        reader = pa.ipc.open_file(file)
        assert [reader.get_batch(batch).num_rows for batch in range(reader.num_record_batches)] == [2, 2, 1, 1]


def test_a_stripe_tells_its_classes_and_its_kind(packed: Index) -> None:
    with pa.OSFile(str(path_of(packed, 0))) as file:
        opened = pa.ipc.open_file(file).schema
    assert opened.names == ["audio", "label", "key"]
    assert json.loads(opened.metadata[b"unisono"]) == {"classes": ["no", "yes"], "kind": "audio", "shape": None}


Row = tuple[bytes, int, str]
ROWS = st.lists(st.tuples(st.binary(max_size=12), st.integers(0, 1 << 31), st.text(max_size=5)), min_size=1, max_size=6)
STRIPE = Path("pack/stripe-00007.arrow")


def batch_of(rows: list[Row]) -> tuple[pa.RecordBatch, dict[bytes, bytes]]:
    samples, labels, keys = (list(column) for column in zip(*rows, strict=True))
    return to_batch(schema(IMAGE, {}, ""), samples, labels, keys)


def flipped(batch: pa.RecordBatch, column: int, buffer: int, place: int, mask: int) -> pa.RecordBatch:
    """The batch with a byte of one of its buffers changed, behind Arrow's back."""
    arrays = batch.columns
    array = arrays[column]
    buffers = [None if each is None else bytearray(each) for each in array.buffers()]
    arrow_buffers = [None if each is None else pa.py_buffer(each) for each in buffers]
    arrays[column] = pa.Array.from_buffers(array.type, len(array), arrow_buffers)
    made = pa.RecordBatch.from_arrays(arrays, schema=batch.schema)
    buffers[buffer][place] ^= mask
    return made


@given(rows=ROWS)
def test_samples_come_back_as_they_were(rows: list[Row]) -> None:
    data, offsets = samples_of(STRIPE, 0, *batch_of(rows))
    assert len(data) == offsets[-1]
    assert [data[begin:end].tobytes() for begin, end in pairwise(offsets)] == [sample for sample, _, _ in rows]


@given(rows=ROWS, choose=st.data())
def test_any_byte_that_is_changed_is_noticed(rows: list[Row], choose: st.DataObject) -> None:
    batch, beside = batch_of(rows)
    places = [
        (column, buffer_index)
        for column, array in enumerate(batch.columns)
        for buffer_index, buffer in enumerate(array.buffers())
        if buffer is not None and buffer.size
    ]
    column, buffer = choose.draw(st.sampled_from(places))
    place = choose.draw(st.integers(0, batch.column(column).buffers()[buffer].size - 1))
    changed = flipped(batch, column, buffer, place, choose.draw(st.integers(1, 255)))
    message = r"stripe-00007\.arrow is damaged: batch 5 has the checksum \w+, but \w+ was written; copy the pack again"
    with pytest.raises(PackError, match=message):
        samples_of(STRIPE, 5, changed, beside)


@given(rows=ROWS, other=ROWS)
def test_other_rows_have_another_checksum(rows: list[Row], other: list[Row]) -> None:
    assert (checksum(batch_of(rows)[0]) == checksum(batch_of(other)[0])) == (rows == other)


def test_where_samples_begin_is_part_of_the_checksum() -> None:
    first, second = batch_of([(b"ab", 0, "x"), (b"c", 0, "y")]), batch_of([(b"a", 0, "x"), (b"bc", 0, "y")])
    assert first[1] != second[1]


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
    made = schema(kind, {"classes": ["cat", "dog"]}, "mark")
    assert (made.names, made.types) == ([name, "label", "key"], [pa.binary(), pa.int64(), pa.string()])
    assert json.loads(made.metadata[UNISONO]) == {"classes": ["cat", "dog"]}
    assert made.metadata[ORIGIN] == b"mark"


@given(data=st.binary(max_size=9000), begin=st.integers(0, (1 << 32) - 1))
def test_any_library_finds_the_checksum_that_zlib_does(data: bytes, begin: int) -> None:
    assert index.crc32(data, begin) == zlib.crc32(data, begin)
