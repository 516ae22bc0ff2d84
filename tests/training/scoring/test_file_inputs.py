from __future__ import annotations

import io
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.data.conftest import work_on_ranks

from unisono.binding import CoreShare
from unisono.data.builtin import load_digits
from unisono.data.kinds import AUDIO, IMAGE, RAW
from unisono.data.kinds.text import TextOptions
from unisono.data.loading import PROCESSOR
from unisono.data.options import DataOptions
from unisono.data.pack.index import About, Index
from unisono.data.pack.packing import PackOptions, pack
from unisono.data.sources import Source, find
from unisono.errors import DecodeError, PackError, UsageError
from unisono.training.recipe import Recipe
from unisono.training.scoring.evaluate import open_test_set
from unisono.training.scoring.predict import FileInputs, TextInputs, open_inputs

Samples = Callable[..., Path]


def recording(seed: int) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(np.random.default_rng(seed).integers(-999, 999, 4000).astype(np.int16).tobytes())
    return out.getvalue()


def index_of(about: About) -> Index:
    none = np.zeros(0, np.int32)
    return Index(about, none, none, none, none, none, Path("packs/a"))


def opened(recipe: DataOptions) -> FileInputs:
    inputs = open_inputs(recipe, "")
    assert isinstance(inputs, FileInputs)
    return inputs


def evaluated_inputs(recipe: DataOptions) -> torch.Tensor:
    """All test samples of a pack, as an evaluation has them."""

    def work(world: Any) -> torch.Tensor:
        tests = open_test_set(Recipe(data=recipe), None, world, CoreShare((0,), 1, False), PROCESSOR)
        ((inputs, _),) = [(inputs.clone(), labels) for inputs, labels in tests.in_turn(99)]
        tests.close()
        return inputs

    return work_on_ranks(1, work)[0]


@pytest.mark.parametrize(("augment", "short_side"), [("none", 256), ("scale", 256), ("none", 0), ("none", 40)])
def test_an_image_is_converted_as_the_packed_one_was(
    image_samples: Samples, tmp_path: Path, augment: str, short_side: int
) -> None:
    """Larger than the pack's short side, so it is reduced before it is cropped."""
    for part, seed in (("train", 0), ("test", 1)):
        image_samples(tmp_path / "images" / part, count=3, size=(300, 280), seed=seed)
        (source,) = find(tmp_path / "images" / part).values()
        pack(source, tmp_path / "pack" / part, PackOptions(short_side, stripes=2), 1, lambda: None)
    recipe = DataOptions(pack=str(tmp_path / "pack"), size=24, augment=augment, threads=1)
    inputs, expected = opened(recipe), evaluated_inputs(recipe)
    files = sorted((tmp_path / "images" / "test").rglob("*.jpg"))
    assert len(files) == len(expected) == 6
    for file, other in zip(files, expected, strict=True):
        sample = inputs.read(file)
        assert torch.equal(sample[0], other)
        assert sample.is_contiguous(memory_format=torch.channels_last)
    assert (inputs.names, inputs.classes, inputs.channels) == (("cat", "dog"), 2, 3)
    assert inputs.blank(2).shape == (2, 3, 24, 24)


def test_a_recording_is_converted_as_the_packed_one_was(tmp_path: Path) -> None:
    samples = [recording(seed) for seed in range(3)]
    for part in ("train", "test"):
        sizes = np.array([len(sample) for sample in samples])
        source = Source(AUDIO, ("a", "b", "c"), list("012"), np.arange(3), sizes, samples.__getitem__)
        pack(source, tmp_path / part, PackOptions(stripes=1), 1, lambda: None)
    (tmp_path / "one.wav").write_bytes(samples[1])
    recipe = DataOptions(pack=str(tmp_path), windows=4, context=2, augment="shift", threads=1)
    inputs = opened(recipe)
    assert torch.equal(inputs.read(tmp_path / "one.wav")[0], evaluated_inputs(recipe)[1])
    (tmp_path / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(DecodeError, match=r"; the run takes audio: \.wav"):
        inputs.read(tmp_path / "image.png")


def test_an_image_file_of_a_raw_image_is_that_image(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    source = Source(RAW, ("a",), ["0"], np.zeros(1, np.int64), np.array([192]), lambda _: pixels.tobytes(), (8, 8, 3))
    for part in ("train", "test"):
        pack(source, tmp_path / part, PackOptions(stripes=1), 1, lambda: None)
    Image.fromarray(pixels).save(tmp_path / "raw.png")
    recipe = DataOptions(pack=str(tmp_path), threads=1)
    assert torch.equal(opened(recipe).read(tmp_path / "raw.png"), evaluated_inputs(recipe))


def test_an_image_file_of_a_digit_is_that_digit(tmp_path: Path) -> None:
    digit = load_digits().test.inputs[7]
    Image.fromarray((255 * digit[0]).round().numpy().astype(np.uint8)).save(tmp_path / "digit.png")
    inputs = opened(DataOptions())
    torch.testing.assert_close(inputs.read(tmp_path / "digit.png")[0], digit, rtol=0, atol=0.51 / 255)
    assert (inputs.names, inputs.channels, inputs.blank(3).shape) == (tuple("0123456789"), 1, (3, 1, 8, 8))


def test_files_that_are_no_image_are_named(tmp_path: Path) -> None:
    inputs = FileInputs(index_of(About(IMAGE, ("a",), mean=(0.5,), std=(0.5,))), DataOptions(size=8))
    for content, message in (
        (b"", r"it is empty; the run takes images: \.jpg, "),
        (recording(0), r"it holds audio; the run takes images: \.jpg, "),
        (b"a text", r"it is no image in a format that Pillow knows; the run takes images"),
        (b"\xff\xd8\xff\xe0 torn", "; the run takes images"),
    ):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(DecodeError, match=message):
            inputs.read(tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        inputs.read(tmp_path / "missing.png")


def test_a_pack_that_is_missing_or_has_no_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PackError, match=r"nowhere has no pack named train or training.*unisono pack"):
        open_inputs(DataOptions(pack=str(tmp_path / "nowhere")), "")
    with pytest.raises(PackError, match="samples of 4 channels, which no image file has"):
        FileInputs(index_of(About(RAW, ("a",), (8, 8, 4), (0.5,) * 4, (0.5,) * 4)), DataOptions())


def test_a_tokenizer_is_refused_for_others() -> None:
    with pytest.raises(UsageError, match=r"--tokenizer t\.json is for texts, but the run takes images; omit it"):
        open_inputs(DataOptions(), "t.json")


def test_a_pack_of_texts_takes_files_of_text(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("one two three four five six" * 2)
    for name, source in find(tmp_path / "text.txt", TextOptions(window=2)).items():
        pack(source, tmp_path / "packs" / name, PackOptions(stripes=1), 1, lambda: None)
    inputs = open_inputs(DataOptions(pack=str(tmp_path / "packs")), "")
    assert isinstance(inputs, TextInputs)
    assert (inputs.classes, inputs.channels, inputs.blank(3).shape) == (256, 2, (3, 2))
