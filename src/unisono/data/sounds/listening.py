"""Lets a network listen to recordings: reads one, makes frames, normalises them, cuts windows.

    bytes ─ mean of the channels ─ frames ─ (x - mean) / deviation of each band ─ masks ─ windows ─▶ float32

Mean and deviation are the recording's own, so that neither how loud it is nor its microphone is heard.
"""

from __future__ import annotations

import numpy as np
import torch

from unisono.data.dice import Throws
from unisono.data.sounds.hearing import Hearing, hear
from unisono.data.sounds.spectrum import Frames, Spectrum
from unisono.data.sounds.wav import read_wav

LOUDEST = 32768
"""What a sample of 16 bits is below."""

STILL = 0.01
"""The least deviation that is taken out: a band in which nothing changes stays still."""


class Listen:
    """Listens to recordings in one thread."""

    def __init__(self, hearing: Hearing) -> None:
        self.shape = hearing.shape
        self._hearing = hearing
        self._around = np.arange(-hearing.context, hearing.context + 1)
        self._spectra: dict[int, Spectrum] = {}

    def into(self, out: torch.Tensor, file: memoryview, random: Throws | None) -> None:
        """Put what is heard of one recording into `out`, (windows, numbers), float32 or bfloat16.

        Without `random`, as in validation. Raises PictureError where the bytes are no recording.
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
        """A batch as a network takes it: (samples, windows, numbers), as it lies."""
        return memory


def normalised(frames: Frames) -> Frames:
    """The frames with mean and deviation of each band taken out."""
    mean, deviation = frames.mean(axis=0, dtype=np.float64), frames.std(axis=0, dtype=np.float64)
    found: Frames = ((frames - mean) / np.maximum(deviation, STILL)).astype(np.float32)
    return found
