from __future__ import annotations

import io
import struct
import wave
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from unisono.data.audio.wav import MAX_RATE, MIN_RATE, read_wav
from unisono.errors import DecodeError

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
        found, reported = read_wav(each)
        np.testing.assert_array_equal(found, numbers)
        assert (found.dtype, reported) == (np.int16, rate)


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
    found, _ = read_wav(b"RIFF" + struct.pack("<I", len(body)) + body)
    assert found.tolist() == [[3], [4], [5]]
