"""Recordings are packed as they are, or refused."""

from __future__ import annotations

import io
import struct
import wave
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from unisono.data.kinds.audio import (
    BANDS,
    MAX_RATE,
    MIN_RATE,
    AudioKind,
    AudioTransform,
    AudioWindows,
    choose_windows,
    read_wav,
)
from unisono.data.options import DataOptions
from unisono.data.order import DRAWS_PER_SAMPLE, CounterRNG, uniform_numbers
from unisono.data.pack.packing import PackOptions
from unisono.errors import DecodeError

BROKEN = {"words": b"these are words", "zeros": bytes(2000), "start": b"RIFF"}

damage = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4)


def sound(frames: int = 100, width: int = 2, channels: int = 1) -> bytes:
    """A wav file."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(8000)
        file.writeframes(np.random.default_rng(0).bytes(frames * width * channels))
    return out.getvalue()


@pytest.mark.parametrize("file", BROKEN.values(), ids=BROKEN)
def test_what_is_no_wav_file_is_refused(file: bytes) -> None:
    with pytest.raises(DecodeError, match="no wav file"):
        AudioKind().encode(file, PackOptions())


@pytest.mark.parametrize("channels", [1, 2])
def test_an_audio_file_stays_as_it_is(channels: int) -> None:
    file = sound(channels=channels)
    assert AudioKind().encode(file, PackOptions()) == file


@pytest.mark.parametrize("width", [1, 3, 4])
def test_an_audio_file_of_other_than_16_bits_is_refused(width: int) -> None:
    with pytest.raises(DecodeError, match=f"{8 * width} bits"):
        AudioKind().encode(sound(width=width), PackOptions())


@pytest.mark.parametrize("left", [44, 45, 100, 243])
def test_an_audio_file_that_is_not_all_there_is_refused_with_what_there_is(left: int) -> None:
    with pytest.raises(DecodeError, match="of 200 bytes of audio"):
        AudioKind().encode(sound()[:left], PackOptions())


def test_an_audio_file_of_no_length_is_refused() -> None:
    with pytest.raises(DecodeError, match="0 of 0"):
        AudioKind().encode(sound(0), PackOptions())


@pytest.mark.parametrize("left", [4, 12, 30, 40])
def test_the_beginning_of_an_audio_file_is_no_audio_file(left: int) -> None:
    with pytest.raises(DecodeError, match="no wav file"):
        AudioKind().encode(sound()[:left], PackOptions())


def test_an_audio_file_whose_parts_end_outside_it_is_refused() -> None:
    file = bytearray(sound())
    file[19] = 1
    with pytest.raises(DecodeError, match="no wav file"):
        AudioKind().encode(bytes(file), PackOptions())


def test_an_audio_file_of_fractions_is_refused() -> None:
    file = bytearray(sound())
    file[20] = 3
    with pytest.raises(DecodeError, match="no wav file"):
        AudioKind().encode(bytes(file), PackOptions())


@given(damage, st.booleans())
def test_a_damaged_audio_file_is_refused_or_stays_as_it_is(damage: list[tuple[float, int]], early: bool) -> None:
    file = bytearray(sound())
    for place, value in damage:
        file[int(place * (44 if early else len(file)))] = value
    try:
        assert AudioKind().encode(bytes(file), PackOptions()) == bytes(file)
    except DecodeError:
        return


Wav = Callable[..., bytes]

HEAD = 44
"""Bytes before the samples."""


@given(st.integers(1, 300), st.integers(1, 6), st.integers(MIN_RATE, MAX_RATE), st.integers(0, 99))
@example(1, 1, MIN_RATE, 0)
@example(1, 1, MAX_RATE, 0)
def test_what_was_written_is_read(wav: Wav, samples: int, channels: int, rate: int, seed: int) -> None:
    numbers = np.random.default_rng(seed).integers(-(2**15), 2**15, (samples, channels)).astype(np.int16)
    file = wav(numbers, rate)
    for each in (file, memoryview(bytearray(file))):
        values, reported = read_wav(each)
        np.testing.assert_array_equal(values, numbers)
        assert (values.dtype, reported) == (np.int16, rate)


@given(st.integers(0, HEAD + 2 * 60 - 1))
def test_the_beginning_of_a_recording_is_refused(wav: Wav, left: int) -> None:
    with pytest.raises(DecodeError):
        read_wav(wav(np.arange(60))[:left])


@given(st.integers(0, HEAD - 1), st.integers(0, 255))
def test_a_head_of_other_bytes_is_read_or_refused(wav: Wav, place: int, byte: int) -> None:
    file = bytearray(wav(np.arange(60)))
    file[place] = byte
    try:
        samples, rate = read_wav(bytes(file))
    except DecodeError:
        return
    assert samples.size <= 60
    assert len(samples) > 0
    assert MIN_RATE <= rate <= MAX_RATE


@pytest.mark.parametrize("rate", [1, MIN_RATE - 1, MAX_RATE + 1, 2**31 - 1])
def test_a_rate_that_cannot_be_meant_is_refused(wav: Wav, rate: int) -> None:
    with pytest.raises(DecodeError, match=f"it has {rate} samples a second; 100 to 1000000 are supported"):
        read_wav(wav([1, 2, 3], rate))


@pytest.mark.parametrize("width", [1, 3, 4])
def test_numbers_of_other_than_16_bits_are_refused(width: int) -> None:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, width, 8000, 0, "NONE", ""))
        out.writeframes(bytes(12))
    with pytest.raises(DecodeError, match=f"its samples have {8 * width} bits; only 16 bits are supported"):
        read_wav(file.getvalue())


def test_a_recording_of_no_length_is_refused(wav: Wav) -> None:
    with pytest.raises(DecodeError, match="it has 0 of 0 bytes of audio"):
        read_wav(wav([]))


def test_what_lies_before_the_samples_and_after_them_is_passed_over(wav: Wav) -> None:
    """Programs write who has made a recording, and when."""
    file = wav([3, 4, 5])
    note = b"LIST" + struct.pack("<I", 6) + b"who?  "
    body = file[8:12] + note + file[12:] + note
    values, _ = read_wav(b"RIFF" + struct.pack("<I", len(body)) + body)
    assert values.tolist() == [[3], [4], [5]]


COUNTS = st.integers(1, 70), st.integers(1, 5000)
"""Windows and frames."""


def times(augment: str, count: int, frames: int = 60) -> list[AudioWindows]:
    """What is heard of one recording with different random numbers."""
    audio_options = DataOptions(windows=6, context=2, augment=augment)
    return [
        choose_windows(audio_options, frames, CounterRNG(row))
        for row in uniform_numbers(0, 0, np.arange(count), DRAWS_PER_SAMPLE).tolist()
    ]


def test_the_example() -> None:
    assert choose_windows(DataOptions(windows=3, context=2), 12, None) == AudioWindows((2, 6, 10))
    assert AudioTransform(DataOptions(windows=3, context=2)).shape == (3, 200)


@given(*COUNTS, st.floats(0, 1, exclude_max=True))
@example(7, 3, 1 - 2**-53)
@example(1, 5000, 1 - 2**-53)
def test_there_is_a_window_in_each_stretch_wherever_they_are_shifted(windows: int, frames: int, place: float) -> None:
    middles = choose_windows(
        DataOptions(windows=windows, context=0, augment="shift"), frames, CounterRNG([place])
    ).middles
    assert len(middles) == windows
    for window, middle in enumerate(middles):
        assert 0 <= middle < frames
        assert window * frames - windows <= middle * windows <= (window + 1) * frames
    assert list(middles) == sorted(middles)
    assert len(set(middles)) >= min(windows, frames) - 1, "rounding may lead to the end"


@given(*COUNTS)
def test_in_validation_windows_lie_evenly_and_alike_from_both_ends(windows: int, frames: int) -> None:
    for augment in AudioKind.augments:
        heard = choose_windows(DataOptions(windows=windows, context=0, augment=augment), frames, None)
        assert heard == choose_windows(DataOptions(windows=windows, context=0), frames, None)
        assert heard.bands == heard.frames == (0, 0)
        for middle, mirrored in zip(heard.middles, reversed(heard.middles), strict=True):
            assert middle + mirrored in (frames - 1, frames)
        apart = {after - before for before, after in zip(heard.middles, heard.middles[1:], strict=False)}
        assert apart <= {frames // windows, -(-frames // windows)}


def test_nothing_is_changed_at_random_unless_it_is_wanted() -> None:
    assert choose_windows(DataOptions(windows=5, context=1, augment="none"), 50, CounterRNG([])) == choose_windows(
        DataOptions(windows=5, context=1), 50, None
    )


def test_all_windows_are_shifted_alike_and_every_frame_may_be_the_middle_of_one() -> None:
    drawn = times("shift", 3000)
    assert {(heard.bands, heard.frames) for heard in drawn} == {((0, 0), (0, 0))}
    assert all(np.diff(heard.middles).tolist() == [10] * 5 for heard in drawn)
    counts = Counter(heard.middles[0] for heard in drawn)
    assert set(counts) == set(range(10))
    assert 220 < min(counts.values()) < max(counts.values()) < 380


def test_masks_have_any_length_up_to_a_quarter_and_any_place() -> None:
    drawn = times("mask", 12000)
    assert [heard.middles for heard in drawn[:50]] == [heard.middles for heard in times("shift", 50)]
    for length, stretches in ((BANDS, [heard.bands for heard in drawn]), (60, [heard.frames for heard in drawn])):
        wide = Counter(last - first for first, last in stretches)
        assert set(wide) == set(range(length // 4 + 1))
        assert min(wide.values()) > 0.7 * 12000 / len(wide)
        firsts = Counter(first for first, last in stretches if last - first == 2)
        assert set(firsts) == set(range(length - 1))
        assert all(0 <= first <= last <= length for first, last in stretches)
        covered = Counter(place for first, last in stretches for place in range(first, last))
        assert set(covered) == set(range(length))
    pairs = {(heard.bands, heard.frames) for heard in drawn}
    assert len(pairs) > 10000, "one does not follow from the other"


@given(st.integers(1, 3), st.integers(0, 99))
def test_of_a_recording_of_few_frames_none_is_masked(frames: int, seed: int) -> None:
    first, last = choose_windows(
        DataOptions(windows=4, context=1, augment="mask"),
        frames,
        CounterRNG(uniform_numbers(seed, 0, np.array([0]), DRAWS_PER_SAMPLE)[0].tolist()),
    ).frames
    assert first == last


@pytest.mark.parametrize("augment", AudioKind.augments)
def test_windows_follow_from_the_random_numbers_alone(augment: str) -> None:
    assert times(augment, 20) == times(augment, 20)
