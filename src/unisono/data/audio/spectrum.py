"""Log-mel frames: the power of a recording in each mel band, a hundred times a second.

    samples   ├───── 25 ms ─────┤                     frame 0
                     ├───── 25 ms ─────┤              frame 1, 10 ms later
                            ├───── 25 ms ─────┤       frame 2
    a frame   x Hann window ─ FFT ─ squares ─ 40 triangles ─ log ─▶ 40 numbers

Triangles (Davis and Mermelstein 1980): a band begins at the middle of the band before, has its peak at its own middle
and ends at that of the next. Middles are equally spaced in mel, mel(f) = 2595 log10(1 + f / 700), perceived pitch:
about linear up to 700 Hz, logarithmic above.

Half a second at 8,000 samples a second: a frame has 200 samples and begins 80 after the one before, so there are
1 + (4000 - 200) // 80 = 48; an FFT of 256 has a bin each 31.25 Hz; the bands' middles are 33, 68, 105, ... 3,787 Hz.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Frames = NDArray[np.float32]
"""Log-mel frames, (frames, BANDS)."""

FRAME_SECONDS, HOP_SECONDS = 0.025, 0.010
"""Length of a frame, and distance from its beginning to that of the next, in seconds."""

BANDS = 40

MIN_POWER = 1e-8
"""Smallest power, about that of 16-bit rounding noise in silence."""

FRAMES_AT_ONCE = 512
"""Number of frames made at once, so that the intermediate arrays of long recordings stay small."""


class Spectrum:
    """Log-mel frames of recordings of one sample rate."""

    def __init__(self, rate: int) -> None:
        """Prepare window and bands. `rate` is samples a second."""
        self._length, self._hop = round(FRAME_SECONDS * rate), round(HOP_SECONDS * rate)
        narrowest = hertz(mel(rate / 2) / (BANDS + 1))
        least = max(self._length, math.ceil(rate / narrowest))  # so that the narrowest band has a bin
        self._size = 1 << (least - 1).bit_length()
        self._window = np.hanning(self._length + 1)[:-1].astype(np.float32)
        self._bands = triangles(rate, self._size)

    def frames(self, samples: NDArray[np.float32]) -> Frames:
        """Return the frames of samples from -1 to 1, (frames, BANDS); samples after the last whole frame are dropped.

        A recording that is shorter than a frame is padded with silence.
        """
        if len(samples) < self._length:
            samples = np.pad(samples, (0, self._length - len(samples)))
        cut = sliding_window_view(samples, self._length)[:: self._hop]
        frames = np.empty((len(cut), BANDS), np.float32)
        for first in range(0, len(cut), FRAMES_AT_ONCE):
            waves = np.fft.rfft(cut[first : first + FRAMES_AT_ONCE] * self._window, self._size)
            power = waves.real**2 + waves.imag**2
            # not BLAS, whose threads would compete with training for the cores
            np.einsum("fk,bk->fb", power, self._bands, out=frames[first : first + FRAMES_AT_ONCE])
        np.log(np.maximum(frames, MIN_POWER, out=frames), out=frames)
        return frames


def triangles(rate: int, size: int) -> NDArray[np.float32]:
    """Return the weight of each bin of an FFT of `size` samples in each band, (BANDS, size // 2 + 1), 1 at its peak."""
    edges = np.array([hertz(step * mel(rate / 2) / (BANDS + 1)) for step in range(BANDS + 2)])
    below, middle, above = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    bins = np.arange(size // 2 + 1) * (rate / size)
    sides = (bins - below) / (middle - below), (above - bins) / (above - middle)
    weights: NDArray[np.float32] = np.maximum(0, np.minimum(*sides)).astype(np.float32)
    return weights


def mel(frequency: float) -> float:
    """Return the pitch in mel of a frequency in hertz: perceived pitch."""
    return 2595 * math.log10(1 + frequency / 700)


def hertz(pitch: float) -> float:
    """Return the frequency in hertz of a pitch in mel: the inverse of `mel`."""
    return 700 * (math.pow(10, pitch / 2595) - 1)
