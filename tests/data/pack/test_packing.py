from __future__ import annotations

import errno
import io
import json
import os
import time
import wave
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from threading import Event

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.data.feed import has_other_classes
from unisono.data.kinds import AUDIO, IMAGE, RAW
from unisono.data.pack import packing
from unisono.data.pack.index import Index, describe, read_index
from unisono.data.pack.packing import PackOptions, _fingerprint, pack
from unisono.data.pack.stripe import read_stretch
from unisono.data.sources import Source, find
from unisono.errors import PackError

Pictures = Callable[..., Path]

SAMPLES = 30
WAY = PackOptions(stripes=5)


def audio_samples() -> Source:
    """Recordings of two classes, of different lengths."""
    rng, files = np.random.default_rng(0), list[bytes]()
    for _ in range(SAMPLES):
        out = io.BytesIO()
        with wave.open(out, "wb") as file:
            file.setparams((1, 2, 8_000, 0, "NONE", ""))
            file.writeframes(rng.bytes(2 * int(rng.integers(1, 100))))
        files.append(out.getvalue())
    keys, labels = [f"{index}.wav" for index in range(SAMPLES)], rng.integers(0, 2, SAMPLES)
    sizes = np.array([len(file) for file in files], np.int64)
    return Source(AUDIO, ("no", "yes"), keys, labels, sizes, lambda index: files[index])


SOUNDS = audio_samples()


def quiet() -> None:
    """Nobody looks at how far it is."""


def failing(after: int, error: BaseException) -> Callable[[], None]:
    """Fails when so many samples are done, and from then on."""
    calls = count(1)

    def advance() -> None:
        if next(calls) > after:
            raise error

    return advance


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def read_finished(folder: Path) -> dict[str, tuple[int, int]]:
    """The stripes that are finished in a folder without an index, and which files they are."""
    files = {note: note.with_suffix(".arrow").stat() for note in folder.glob("stripe-*.json")}
    return {note.stem: (stat.st_ino, stat.st_mtime_ns) for note, stat in files.items()}


def still(folder: Path, before: dict[str, tuple[int, int]]) -> bool:
    """Whether these stripes are the same files."""
    now = {stem: (folder / f"{stem}.arrow").stat() for stem in before}
    return before == {stem: (stat.st_ino, stat.st_mtime_ns) for stem, stat in now.items()}


def samples_of(index: Index) -> list[bytes]:
    return [
        data[begin:end].tobytes()
        for data, offsets in read_stretch(index, 0, len(index))
        for begin, end in pairwise(offsets)
    ]


@pytest.fixture(scope="module", autouse=True)
def small_batches() -> Iterator[None]:
    """Batches of a few samples, so that stripes have several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "BATCH_BYTES", 400)
        yield


@pytest.fixture(scope="module")
def whole(small_batches: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of the pack, made in one go."""
    folder = tmp_path_factory.mktemp("whole")
    pack(SOUNDS, folder, WAY, 1, quiet)
    return contents(folder)


def test_a_pack_has_all_samples_in_order(tmp_path: Path) -> None:
    calls: list[None] = []
    made = pack(SOUNDS, tmp_path / "deep/pack", WAY, 2, lambda: calls.append(None))
    index = read_index(tmp_path / "deep/pack")
    assert index.about == made.about
    assert samples_of(index) == [SOUNDS.read(position) for position in range(SAMPLES)]
    assert index.label.tolist() == SOUNDS.labels.tolist()
    assert index.length.tolist() == SOUNDS.sizes.tolist()
    assert (index.about.kind, index.about.classes, index.about.skipped) == (AUDIO, ("no", "yes"), ())
    assert len(calls) == SAMPLES


def test_a_pack_is_stripes_and_an_index_and_nothing_else(whole: dict[str, bytes]) -> None:
    assert sorted(whole) == ["index.arrow", *(f"stripe-0000{stripe}.arrow" for stripe in range(5))]


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_a_pack_is_the_same_whatever_the_number_of_threads(
    threads: int, whole: dict[str, bytes], tmp_path: Path
) -> None:
    pack(SOUNDS, tmp_path, WAY, threads, quiet)
    assert contents(tmp_path) == whole


@settings(max_examples=25)
@given(after=st.integers(0, SAMPLES - 1), threads=st.integers(1, 3), interrupted=st.booleans())
def test_a_stopped_pack_resumes_and_ends_the_same(
    after: int,
    threads: int,
    interrupted: bool,
    whole: dict[str, bytes],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("stopped")
    error = KeyboardInterrupt() if interrupted else OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(KeyboardInterrupt if interrupted else PackError) as caught:
        pack(SOUNDS, folder, WAY, threads, failing(after, error))
    before = read_finished(folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        f"{stem}{ending}" for stem in before for ending in (".arrow", ".json")
    )
    if not interrupted:
        assert str(caught.value) == (
            f"{folder}: No space left on device; {len(before)} of 5 stripes are finished; run the same command again "
            "to resume"
        )
    calls: list[None] = []
    pack(SOUNDS, folder, WAY, 1, lambda: calls.append(None))
    assert len(calls) == SAMPLES
    assert still(folder, before)
    assert contents(folder) == whole


def test_one_thread_that_is_stopped_late_has_finished_the_first_stripes(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        pack(SOUNDS, tmp_path, WAY, 1, failing(SAMPLES - 1, KeyboardInterrupt()))
    assert sorted(read_finished(tmp_path)) == [f"stripe-0000{stripe}" for stripe in range(4)]


def test_what_fails_in_one_thread_stops_the_others(tmp_path: Path) -> None:
    """Two stripes, a thread each: the first fails when the second is begun, which would take long."""
    count, failed, reads = 2_000, Event(), list[int]()
    sound = SOUNDS.read(0)

    def read(index: int) -> bytes:
        reads.append(index)
        if index >= count:
            failed.wait(60)
            time.sleep(0.001)
        return sound

    def advance() -> None:
        if failed.is_set():
            return
        while not any(index >= count for index in reads):
            time.sleep(0.001)
        failed.set()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    keys, sizes = [str(index) for index in range(2 * count)], np.full(2 * count, len(sound), np.int64)
    source = Source(AUDIO, ("no",), keys, np.zeros(2 * count, np.int64), sizes, read)
    with pytest.raises(PackError, match="No space left on device; 0 of 2 stripes are finished"):
        pack(source, tmp_path, PackOptions(stripes=2), 2, advance)
    assert len(reads) < count
    assert contents(tmp_path) == {}


def test_a_full_disk_while_the_index_is_written_is_reported(
    whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(index: Index, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(packing, "write_index", write)
        with pytest.raises(PackError, match="No space left on device; 5 of 5 stripes are finished"):
            pack(SOUNDS, tmp_path, WAY, 1, quiet)
    before = read_finished(tmp_path)
    assert (len(before), [*tmp_path.glob("index*")]) == (5, [])
    pack(SOUNDS, tmp_path, WAY, 1, quiet)
    assert still(tmp_path, before)
    assert contents(tmp_path) == whole


def test_what_a_killed_process_left_half_done_goes_away(whole: dict[str, bytes], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        pack(SOUNDS, tmp_path, WAY, 1, failing(20, KeyboardInterrupt()))
    for name in ("stripe-00004.arrow.0a1b.partial", "stripe-00031.arrow.partial", "stripe-00004.json.0a1b.partial"):
        (tmp_path / name).write_bytes(b"half")
    (tmp_path / "index.arrow.0a1b.partial").write_bytes(b"half")
    (tmp_path / "stripe-00004.arrow").write_bytes(b"whole, but its note was not written")
    (tmp_path / "stripe-00000.json").write_bytes(b"")  # as after a power cut
    pack(SOUNDS, tmp_path, WAY, 1, quiet)
    assert contents(tmp_path) == whole


def test_the_same_again_changes_nothing(whole: dict[str, bytes], tmp_path: Path) -> None:
    made = pack(SOUNDS, tmp_path, WAY, 1, quiet)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    (tmp_path / "stripe-00002.json").write_text("{}")  # killed before it was taken away
    calls: list[None] = []
    again = pack(SOUNDS, tmp_path, WAY, 1, lambda: calls.append(None))
    assert again.about == made.about
    assert len(calls) == SAMPLES
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def other_labels(folder: Path) -> None:
    pack(replace(SOUNDS, labels=1 - SOUNDS.labels), folder, WAY, 1, quiet)


def other_keys(folder: Path) -> None:
    pack(replace(SOUNDS, keys=[f"other {key}" for key in SOUNDS.keys]), folder, WAY, 1, quiet)


def other_classes(folder: Path) -> None:
    pack(replace(SOUNDS, classes=("off", "on")), folder, WAY, 1, quiet)


def other_sizes(folder: Path) -> None:
    pack(replace(SOUNDS, sizes=SOUNDS.sizes + 1), folder, WAY, 1, quiet)


def other_way(folder: Path) -> None:
    pack(SOUNDS, folder, replace(WAY, quality=91), 1, quiet)


OTHERS = [other_labels, other_keys, other_classes, other_sizes, other_way]


@pytest.mark.parametrize("other", OTHERS)
def test_another_data_set_or_other_options_is_refused_in_a_folder_that_is_begun(
    other: Callable[[Path], None], tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        pack(SOUNDS, tmp_path, WAY, 1, failing(20, KeyboardInterrupt()))
    before = contents(tmp_path)
    with pytest.raises(PackError, match="holds a part of another pack, or of this one with other options; remove it"):
        other(tmp_path)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("other", OTHERS)
def test_another_data_set_or_other_options_is_refused_in_a_folder_that_is_full(
    other: Callable[[Path], None], tmp_path: Path
) -> None:
    pack(SOUNDS, tmp_path, WAY, 1, quiet)
    before = contents(tmp_path)
    with pytest.raises(PackError, match="holds a pack already; name another folder, or remove it"):
        other(tmp_path)
    assert contents(tmp_path) == before


def test_a_pack_that_is_no_longer_whole_is_not_taken_for_done(tmp_path: Path) -> None:
    pack(SOUNDS, tmp_path, WAY, 1, quiet)
    (tmp_path / "stripe-00001.arrow").unlink()
    with pytest.raises(PackError, match="holds a pack already; name another folder, or remove it"):
        pack(SOUNDS, tmp_path, WAY, 1, quiet)


def test_a_folder_with_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(PackError, match=r"is not empty: it has letter\.txt; name a new folder"):
        pack(SOUNDS, tmp_path, WAY, 1, quiet)
    with pytest.raises(PackError, match=r"cannot create .*letter\.txt: "):
        pack(SOUNDS, tmp_path / "letter.txt", WAY, 1, quiet)
    assert contents(tmp_path) == {"letter.txt": b"dear"}


def test_broken_and_empty_files_are_skipped_and_listed(image_samples: Pictures, tmp_path: Path) -> None:
    data = image_samples(tmp_path / "data")
    (data / "cat/001.jpg").write_bytes(b"")
    content = (data / "dog/002.jpg").read_bytes()
    (data / "dog/002.jpg").write_bytes(content[: len(content) // 2])
    (data / "dog/005.jpg").write_text("no picture")
    source = find(data)[""]
    (data / "cat/003.jpg").unlink()
    index = pack(source, tmp_path / "pack", PackOptions(stripes=3), 2, quiet)
    whys = dict(index.about.skipped)
    assert list(whys) == ["cat/001.jpg", "cat/003.jpg", "dog/002.jpg", "dog/005.jpg"]
    assert (whys["cat/001.jpg"], whys["cat/003.jpg"]) == ("it is empty", "No such file or directory")
    assert all(whys.values())
    kept = [position for position, key in enumerate(source.keys) if key not in whys]
    assert samples_of(index) == [(data / source.keys[position]).read_bytes() for position in kept]
    assert index.label.tolist() == source.labels[kept].tolist()
    reported = list(describe(tmp_path / "pack"))
    assert [line for line in reported if line.strip().split(":")[0] in whys] == [
        f"    {key}: {why}" for key, why in index.about.skipped
    ]


def test_a_stripe_of_broken_files_alone_is_no_file(image_samples: Pictures, tmp_path: Path) -> None:
    data = image_samples(tmp_path / "data")
    for image in range(4):
        (data / f"cat/{image:03}.jpg").write_bytes(b"")
    index = pack(find(data)[""], tmp_path / "pack", PackOptions(stripes=12), 2, quiet)
    names = [f"stripe-{stripe:05}.arrow" for stripe in range(4, 12)]
    assert [name for name, _ in index.about.stripes] == names
    assert sorted(contents(tmp_path / "pack")) == ["index.arrow", *names]
    assert len(samples_of(index)) == 8


def test_nothing_but_broken_files_leaves_nothing(image_samples: Pictures, tmp_path: Path) -> None:
    data = image_samples(tmp_path / "data", count=3)
    for path in data.rglob("*.jpg"):
        path.write_bytes(b"")
    with pytest.raises(PackError) as caught:
        pack(find(data)[""], tmp_path / "pack", WAY, 2, quiet)
    assert str(caught.value) == (
        "there is no sample to pack (cat/000.jpg: it is empty; cat/001.jpg: it is empty; cat/002.jpg: it is empty)"
    )
    assert contents(tmp_path / "pack") == {}


def test_no_samples_at_all_are_reported(tmp_path: Path) -> None:
    nothing = Source(AUDIO, (), [], np.empty(0, np.int64), np.empty(0, np.int64), lambda position: b"")
    with pytest.raises(PackError, match=r"there is no sample to pack$"):
        pack(nothing, tmp_path / "pack", WAY, 2, quiet)


def test_names_that_are_no_text_are_packed(image_samples: Pictures, tmp_path: Path) -> None:
    data = image_samples(tmp_path / "data", count=2)
    latin = os.fsdecode(b"caf\xe9")
    (data / "cat").rename(data / latin)
    (data / "dog/000.jpg").rename(data / "dog" / f"{latin}.jpg")
    (data / "dog/001.jpg").rename(data / "dog" / f"x{latin}.jpg")
    (data / "dog" / f"x{latin}.jpg").write_bytes(b"")
    index = pack(find(data)[""], tmp_path / "pack", WAY, 1, quiet)
    assert index.about.classes == (r"caf\udce9", "dog")
    assert index.about.skipped == ((r"dog/xcaf\udce9.jpg", "it is empty"),)
    assert read_index(tmp_path / "pack").about == index.about
    assert "\n".join(describe(tmp_path / "pack")).encode()


@pytest.fixture
def stripe_of_pictures(image_samples: Pictures, tmp_path: Path) -> Path:
    """A pack's only stripe."""
    pack(find(image_samples(tmp_path / "data"))[""], tmp_path / "pack", PackOptions(stripes=1), 1, quiet)
    return tmp_path / "pack/stripe-00000.arrow"


def check_columns(path: Path, columns: dict[str, list[object]]) -> None:
    data = path.parents[1] / "data"
    keys = [f"{name}/{image:03}.jpg" for name in ("cat", "dog") for image in range(6)]
    assert columns == {
        "image": [(data / key).read_bytes() for key in keys],
        "label": [0] * 6 + [1] * 6,
        "key": keys,
    }


def test_a_stripe_opens_in_arrow_with_its_classes(stripe_of_pictures: Path) -> None:
    with pa.memory_map(str(stripe_of_pictures)) as file:
        table = pa.ipc.open_file(file).read_all()
    check_columns(stripe_of_pictures, table.to_pydict())
    assert table.schema.types == [pa.binary(), pa.int64(), pa.string()]
    about = json.loads(table.schema.metadata[b"unisono"])
    assert about == {"classes": ["cat", "dog"], "kind": "image", "shape": None}


def test_stripes_open_together_as_an_arrow_data_set(image_samples: Pictures, tmp_path: Path) -> None:
    dataset = pytest.importorskip("pyarrow.dataset")
    pack(find(image_samples(tmp_path / "data"))[""], tmp_path / "pack", PackOptions(stripes=4), 1, quiet)
    stripes = sorted(map(str, (tmp_path / "pack").glob("stripe-*")))
    check_columns(tmp_path / "pack/any", dataset.dataset(stripes, format="ipc").to_table().to_pydict())


def test_a_stripe_opens_in_pandas(stripe_of_pictures: Path) -> None:
    pandas = pytest.importorskip("pandas")
    check_columns(stripe_of_pictures, pandas.read_feather(stripe_of_pictures).to_dict("list"))


def test_a_stripe_opens_in_polars(stripe_of_pictures: Path) -> None:
    polars = pytest.importorskip("polars")
    check_columns(stripe_of_pictures, polars.read_ipc(stripe_of_pictures).to_dict(as_series=False))


def test_a_stripe_opens_in_datasets(stripe_of_pictures: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    files = str(stripe_of_pictures)
    opened = datasets.load_dataset("arrow", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    check_columns(stripe_of_pictures, opened.to_dict())


def test_raw_samples_keep_their_shape(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (7, 4, 5, 3), np.uint8)
    labels, sizes = np.arange(7) % 2, np.full(7, 60, np.int64)
    source = Source(RAW, ("0", "1"), list("abcdefg"), labels, sizes, lambda row: pixels[row].tobytes(), (4, 5, 3))
    index = pack(source, tmp_path / "pack", PackOptions(stripes=2), 1, quiet)
    assert read_index(tmp_path / "pack").about.shape == (4, 5, 3)
    assert b"".join(samples_of(index)) == pixels.tobytes()


@pytest.mark.parametrize(
    ("kind", "shape", "fingerprint"),
    [
        (IMAGE, None, "608c1531645290d9e03177b5ced448bdb86a9c4f97633be54cbb6754dc31b91e"),
        (AUDIO, None, "21f16c38b2c2b3089be3a33f6d98640ca235a3a42ff235d3dbde4017d99ca9cb"),
        (RAW, (8, 8), "7bb2ac14eede6f7d2b5f06fc4a972d9c7d6fd68e1d46961b3902c9ec5babbf37"),
    ],
)
def test_fingerprints_stay_what_they_are(kind: str, shape: tuple[int, int] | None, fingerprint: str) -> None:
    source = Source(kind, ("no", "yes"), ["0.x", "1.x"], np.array([0, 1]), np.array([3, 4]), lambda _: b"", shape)
    assert _fingerprint(source, PackOptions(20, 1, 1024, 50)) == fingerprint


def test_a_fingerprint_of_the_samples_sees_their_content_and_what_they_are(tmp_path: Path) -> None:
    def made(name: str, source: Source, options: PackOptions = WAY) -> str:
        pack(source, tmp_path / name, options, 1, quiet)
        return read_index(tmp_path / name).fingerprint

    own = made("own", SOUNDS)
    assert made("again", SOUNDS, PackOptions(stripes=2)) == own
    others = [
        made("content", replace(SOUNDS, read=lambda position: SOUNDS.read(position)[:-1] + b"!")),
        made("classes", replace(SOUNDS, classes=("no", "maybe"))),
    ]
    assert len({own, *others}) == 3
    assert [has_other_classes(own, each) for each in others] == [False, True]
    old = read_index(tmp_path / "own")
    old = replace(old, about=replace(old.about, content=""))
    assert all(each.startswith(f"{old.fingerprint} ") for each in (own, *others)), "states of older releases are known"


def test_stripes_of_another_pack_are_refused(tmp_path: Path) -> None:
    for name, labels in (("one", SOUNDS.labels), ("two", SOUNDS.labels[::-1])):
        pack(replace(SOUNDS, labels=labels), tmp_path / name, WAY, 1, quiet)
    (tmp_path / "two/index.arrow").write_bytes((tmp_path / "one/index.arrow").read_bytes())
    with pytest.raises(PackError, match=r"stripe-00000\.arrow is another stripe, or of another pack; copy"):
        samples_of(read_index(tmp_path / "two"))
