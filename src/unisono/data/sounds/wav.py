"""Reading of audio recordings: wav files with 16-bit integer samples."""

from __future__ import annotations

import io
import wave

import numpy as np
from numpy.typing import NDArray

from unisono.errors import PictureError

BITS = 16

SLOWEST, FASTEST = 100, 1_000_000
"""Range of samples a second. Other rates occur in damaged files and would make frames empty or endless."""


def read_wav(file: bytes | memoryview) -> tuple[NDArray[np.int16], int]:
    """Return the samples, int16, shape (samples, channels), and the samples a second.

    Raises PictureError if the bytes are no wav file, are truncated, or have other than 16-bit samples or an odd rate.
    """
    try:
        with wave.open(io.BytesIO(file)) as sound:
            frames, channels, rate = sound.getnframes(), sound.getnchannels(), sound.getframerate()
            width = sound.getsampwidth()
            if 8 * width != BITS:
                raise PictureError(f"its numbers have {8 * width} bits; {BITS} are known here")
            samples = sound.readframes(frames)
    except (wave.Error, EOFError, RuntimeError) as error:  # the last of chunks that end outside the file
        raise PictureError(f"it is no wav file: {error}") from error
    nbytes = frames * width * channels
    if frames == 0 or len(samples) < nbytes:
        raise PictureError(f"it has {len(samples)} of {nbytes} bytes of sound")
    if not SLOWEST <= rate <= FASTEST:
        raise PictureError(f"it has {rate} samples a second; {SLOWEST} to {FASTEST} are known here")
    return np.frombuffer(samples, np.int16).reshape(-1, channels), rate  # wave gives them in this machine's order
