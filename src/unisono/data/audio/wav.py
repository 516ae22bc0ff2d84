"""Reading of audio recordings: wav files with 16-bit integer samples."""

from __future__ import annotations

import io
import wave

import numpy as np
from numpy.typing import NDArray

from unisono.errors import DecodeError

BITS = 16

MIN_RATE, MAX_RATE = 100, 1_000_000
"""Range of samples a second. Other rates occur in damaged files and would make frames empty or endless."""


def read_wav(file: bytes | memoryview) -> tuple[NDArray[np.int16], int]:
    """Return the samples, int16, shape (samples, channels), and the samples a second.

    Raises DecodeError if the bytes are no wav file, are truncated, or have other than 16-bit samples or an odd rate.
    """
    try:
        with wave.open(io.BytesIO(file)) as recording:
            frames, channels, rate = recording.getnframes(), recording.getnchannels(), recording.getframerate()
            width = recording.getsampwidth()
            if 8 * width != BITS:
                raise DecodeError(f"its samples have {8 * width} bits; only {BITS} bits are supported")
            samples = recording.readframes(frames)
    except (wave.Error, EOFError, RuntimeError) as error:  # RuntimeError: a chunk ends outside the file
        raise DecodeError(f"it is no wav file: {error}") from error
    nbytes = frames * width * channels
    if frames == 0 or len(samples) < nbytes:
        raise DecodeError(f"it has {len(samples)} of {nbytes} bytes of audio")
    if not MIN_RATE <= rate <= MAX_RATE:
        raise DecodeError(f"it has {rate} samples a second; {MIN_RATE} to {MAX_RATE} are supported")
    return np.frombuffer(samples, np.int16).reshape(-1, channels), rate  # wave returns this machine's byte order
