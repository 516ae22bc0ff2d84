"""Recordings are packed as they are, or refused."""

from __future__ import annotations

import io
import wave

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.data.kinds.audio import AudioKind
from unisono.data.pack.options import PackOptions
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


@settings(max_examples=100, deadline=None)
@given(damage, st.booleans())
def test_a_damaged_audio_file_is_refused_or_stays_as_it_is(damage: list[tuple[float, int]], early: bool) -> None:
    file = bytearray(sound())
    for place, value in damage:
        file[int(place * (44 if early else len(file)))] = value
    try:
        assert AudioKind().encode(bytes(file), PackOptions()) == bytes(file)
    except DecodeError:
        return
