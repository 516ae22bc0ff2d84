"""Conversion of recordings to network inputs: read, make frames, normalise them, cut windows.

    bytes ─ mean of the channels ─ frames ─ (x - mean) / deviation of each band ─ masks ─ windows ─▶ float32

Mean and deviation are the recording's own, so that its loudness and its microphone do not matter.
"""

from __future__ import annotations

import numpy as np
import torch

from unisono.data.dice import Throws
from unisono.data.sounds.hearing import Hearing, hear
from unisono.data.sounds.spectrum import Frames, Spectrum
from unisono.data.sounds.wav import read_wav

LOUDEST = 32768
"""Divisor that scales 16-bit samples to [-1, 1)."""

STILL = 0.01
"""Smallest deviation by which a band is divided: a band in which nothing changes stays still."""


class Listen:
    """Converter of recordings to network inputs, for one thread."""

    def __init__(self, hearing: Hearing) -> None:
        self.shape = hearing.shape
        self._hearing = hearing
        self._around = np.arange(-hearing.context, hearing.context + 1)
        self._spectra: dict[int, Spectrum] = {}

    def into(self, out: torch.Tensor, file: memoryview, random: Throws | None) -> None:
        """Convert one recording into `out`, (windows, numbers), float32 or bfloat16.

        Without `random` it is converted as in validation. Raises PictureError if the bytes are no recording.
        """
        samples, rate = read_wav(file)
        if rate not in self._spectra:
            self._spectra[rate] = Spectrum(rate)
        frames = normalised(self._spectra[rate].frames(samples.mean(axis=1, dtype=np.float32) / LOUDEST))
        heard = hear(self._hearing, len(frames), random)
        frames[:, slice(*heard.bands)] = 0.0
        frames[slice(*heard.frames)] = 0.0
        rows = (np.array(heard.middles)[:, None] + self._around).clip(0, len(frames) - 1)
        out.copy_(torch.from_numpy(frames[rows].reshape(self.shape)))

    @staticmethod
    def batch(memory: torch.Tensor) -> torch.Tensor:
        """Return a batch as the network takes it: (samples, windows, numbers), unchanged."""
        return memory


def normalised(frames: Frames) -> Frames:
    """Return the frames with each band normalised to mean 0 and, from STILL on, deviation 1."""
    mean, deviation = frames.mean(axis=0, dtype=np.float64), frames.std(axis=0, dtype=np.float64)
    found: Frames = ((frames - mean) / np.maximum(deviation, STILL)).astype(np.float32)
    return found
