"""Every kind of the table keeps the contract. A new kind needs a row of EXAMPLES."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from unisono.data.kinds import (
    AUDIO,
    IMAGE,
    KINDS,
    RAW,
    TEXT,
    SampleKind,
    SampleTransform,
    all_augments,
    find_kind,
    kind_of_content,
    make_transform,
)
from unisono.data.options import DataOptions
from unisono.data.order import DRAWS_PER_SAMPLE, CounterRNG, uniform_numbers
from unisono.data.pack.index import About, Index
from unisono.data.pack.packing import PackOptions, pack
from unisono.data.sources import Source, kind_of
from unisono.errors import DecodeError, PackError

COUNT = 7


def recording(index: int) -> bytes:
    import wave

    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(np.random.default_rng(index).integers(-999, 999, 900 + index).astype(np.int16).tobytes())
    return out.getvalue()


def image(index: int) -> bytes:
    out = io.BytesIO()
    pixels = np.random.default_rng(index).integers(0, 256, (40, 30 + index, 3), np.uint8)
    Image.fromarray(pixels).save(out, "PNG" if index % 2 else "JPEG")
    return out.getvalue()


EXAMPLES: dict[str, tuple[list[bytes], tuple[int, ...] | None]] = {
    IMAGE: ([image(index) for index in range(COUNT)], None),
    AUDIO: ([recording(index) for index in range(COUNT)], None),
    RAW: ([np.random.default_rng(index).bytes(8 * 8 * 3) for index in range(COUNT)], (8, 8, 3)),
    TEXT: (
        [np.random.default_rng(index).integers(0, 256, 9).astype("<u2").tobytes() for index in range(COUNT)],
        (9,),
    ),
}
"""Samples of each kind, and the shape of the pack if it has one."""


def packed(name: str, folder: Path) -> Index:
    samples, shape = EXAMPLES[name]
    keys, sizes = [str(index) for index in range(COUNT)], np.array([len(sample) for sample in samples])
    source = Source(name, ("a",), keys, np.zeros(COUNT, np.int64), sizes, samples.__getitem__, shape)
    return pack(source, folder / "pack", PackOptions(stripes=2), 1, lambda: None)


@pytest.mark.parametrize("name", [name for name in KINDS if name != TEXT])
def test_every_kind_but_text_is_shown_by_files(name: str) -> None:
    """Its own files, or those of another kind. A file of text is no sample, but many windows."""
    assert find_kind(find_kind(name).file_kind or name).endings


def converted(transform: SampleTransform, sample: bytes, numbers: list[float] | None) -> torch.Tensor:
    """The network input of a sample, in memory that was full of NaN."""
    out = torch.full(transform.shape, torch.nan)
    transform.into(out, memoryview(bytearray(sample)), None if numbers is None else CounterRNG(numbers))
    return out


def test_every_kind_has_examples() -> None:
    assert set(EXAMPLES) == set(KINDS)


def test_the_kind_of_the_docs_keeps_the_contract() -> None:
    page = (Path(__file__).parents[3] / "docs" / "data.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n([^`]*class MessageKind.*?)```", page, re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {}
    exec(code.group(1), names)
    kind: SampleKind = names["MessageKind"]()
    assert kind.encode("für".encode(), PackOptions()) == "für".encode()
    with pytest.raises(DecodeError, match="no text in UTF-8"):
        kind.encode("für".encode("latin-1"), PackOptions())
    nothing = np.zeros(0, np.int32)
    index = Index(About("message", ("a",)), nothing, nothing, nothing, nothing, nothing)
    sample = converted(kind.transform(index, DataOptions())(), b"abc", None)
    assert sample.tolist() == [97, 98, 99, *[0] * 61]


def test_facts_tell_kinds_apart() -> None:
    kinds = [find_kind(name) for name in KINDS]
    endings = [ending for kind in kinds for ending in kind.endings]
    assert len(set(endings)) == len(endings)
    assert all(ending.startswith(".") and ending == ending.lower() for ending in endings)
    assert all(sum(kind.is_signed(sample) for kind in kinds) <= 1 for each in EXAMPLES.values() for sample in each[0])
    assert all(kind.column and kind.plural and kind.augments[0] == "none" for kind in kinds)
    assert len(set(all_augments())) == len(all_augments())


def test_facts_need_neither_pytorch_nor_the_packages_of_packs() -> None:
    code = (
        "import sys; from unisono.data.kinds import KINDS, find_kind; [find_kind(name) for name in KINDS]; "
        "print([name for name in ('torch', 'pyarrow', 'PIL', 'cv2', 'mpi4py') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_an_unknown_kind_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(PackError, match="no kind of sample 'video'; there are image, audio, raw, text"):
        find_kind("video")


@pytest.mark.parametrize("name", KINDS)
def test_files_are_found_by_their_endings_and_their_content(name: str) -> None:
    kind = find_kind(name)
    assert {kind_of(f"a{ending.upper()}") for ending in kind.endings} <= {name}
    if kind.endings:
        assert {kind_of_content(sample) for sample in EXAMPLES[name][0]} == {name}
    assert kind_of_content(b"RIFF\x24\0\0\0WEBPVP8 ") == "image", "a WebP image is a RIFF file, as a recording is"


@pytest.mark.parametrize("name", KINDS)
def test_what_was_encoded_stays_as_it_is(name: str) -> None:
    """So a pack that is packed again is the same."""
    for options in (PackOptions(), PackOptions(short_side=20)):
        for sample in EXAMPLES[name][0]:
            made = find_kind(name).encode(sample, options)
            assert find_kind(name).encode(made, options) == made


@pytest.mark.parametrize("name", KINDS)
def test_a_broken_file_is_refused_by_its_kind(name: str) -> None:
    kind = find_kind(name)
    if not kind.endings:
        pytest.skip("samples are no files")
    for broken in (b"these are words", EXAMPLES[name][0][0][:50]):
        with pytest.raises(DecodeError):
            kind.encode(broken, PackOptions())


@pytest.mark.parametrize("name", KINDS)
def test_an_augmentation_that_a_kind_does_not_have_is_refused_with_those_that_it_has(name: str) -> None:
    nothing = np.zeros(0, np.int32)
    index = Index(About(name, ("a",)), nothing, nothing, nothing, nothing, nothing, Path("pack"))
    with pytest.raises(
        PackError, match=rf"data\.augment = 'upside down', but pack holds {find_kind(name).plural}; .* none"
    ):
        make_transform(index, DataOptions(augment="upside down"))


@pytest.mark.parametrize("name", KINDS)
def test_a_transform_follows_from_the_bytes_and_the_random_numbers_alone(name: str, tmp_path: Path) -> None:
    index, samples = packed(name, tmp_path), EXAMPLES[name][0]
    draws = uniform_numbers(3, 1, np.arange(COUNT), DRAWS_PER_SAMPLE).tolist()
    for augment in find_kind(name).augments:
        options = DataOptions(size=8, augment=augment, windows=3, context=1)
        make = find_kind(name).transform(index, options)
        reused = make()
        for sample, numbers in zip(samples, draws, strict=True):
            for drawn in (numbers, None):
                result = converted(reused, sample, drawn)
                assert torch.isfinite(result).all()
                assert torch.equal(result, converted(make(), sample, drawn))
        memory = torch.zeros(2, *reused.shape)
        labels = find_kind(name).labels(memory, torch.zeros(2))
        assert labels.numel() == 2 * find_kind(name).labels_per_sample(index.about.shape)
        assert reused.batch(memory).data_ptr() == memory.data_ptr()
        assert len(reused.batch(memory)) == 2
    plain = find_kind(name).transform(index, DataOptions(size=8, windows=3, context=1))()
    assert torch.equal(converted(plain, samples[0], draws[0]), converted(plain, samples[0], None))


@pytest.mark.parametrize("name", KINDS)
def test_a_pack_has_mean_and_std_of_the_channels_if_its_kind_has_pixels(name: str, tmp_path: Path) -> None:
    index = packed(name, tmp_path)
    sample = np.frombuffer(find_kind(name).encode(EXAMPLES[name][0][0], PackOptions()), np.uint8)
    pixels = find_kind(name).pixels(sample, index.about.shape)
    assert len(index.about.mean) == len(index.about.std) == (0 if pixels is None else pixels.shape[-1])
