"""Transform of recordings to network inputs: read, compute log-mel frames, normalise them, cut windows.

    bytes ─ mean of the channels ─ frames ─ (x - mean) / std of each band ─ masks ─ windows ─▶ float32

Mean and standard deviation are the recording's own, which removes loudness and the microphone's response.
"""

from __future__ import annotations

import numpy as np
import torch

from unisono.data.audio.spectrum import Frames, Spectrum
from unisono.data.audio.wav import read_wav
from unisono.data.audio.windows import AudioOptions, choose_windows
from unisono.data.counter_rng import CounterRNG

INT16_SCALE = 32768
"""Divisor that scales 16-bit samples to [-1, 1)."""

MIN_STD = 0.01
"""Smallest standard deviation by which a band is divided: a constant band stays constant."""


class AudioTransform:
    """Transform of recordings to network inputs, for one thread."""

    def __init__(self, options: AudioOptions) -> None:
        self.shape = options.shape
        self._options = options
        self._around = np.arange(-options.context, options.context + 1)
        self._spectra: dict[int, Spectrum] = {}

    def into(self, out: torch.Tensor, file: memoryview, random: CounterRNG | None) -> None:
        """Convert one recording into `out`, (windows, numbers), float32.

        Without `random` it is converted as in validation. Raises DecodeError if the bytes are no recording.
        """
        samples, rate = read_wav(file)
        if rate not in self._spectra:
            self._spectra[rate] = Spectrum(rate)
        frames = normalised(self._spectra[rate].frames(samples.mean(axis=1, dtype=np.float32) / INT16_SCALE))
        windows = choose_windows(self._options, len(frames), random)
        frames[:, slice(*windows.bands)] = 0.0
        frames[slice(*windows.frames)] = 0.0
        rows = (np.array(windows.middles)[:, None] + self._around).clip(0, len(frames) - 1)
        out.copy_(torch.from_numpy(frames[rows].reshape(self.shape)))

    @staticmethod
    def batch(memory: torch.Tensor) -> torch.Tensor:
        """Return a batch as the network takes it: (samples, windows, numbers), unchanged."""
        return memory


def normalised(frames: Frames) -> Frames:
    """Return the frames with each band normalised to mean 0 and, from MIN_STD on, standard deviation 1."""
    mean, std = frames.mean(axis=0, dtype=np.float64), frames.std(axis=0, dtype=np.float64)
    found: Frames = ((frames - mean) / np.maximum(std, MIN_STD)).astype(np.float32)
    return found
