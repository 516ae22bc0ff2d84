"""Recordings, wav files with 16-bit integers: windows of log-mel frames, evenly spread over the recording.

    bytes ─ mean of the channels ─ frames ─ (x - mean) / std of each band ─ masks ─ windows ─▶ float32

Frames: the power of a recording in each mel band, a hundred times a second.

    samples   ├───── 25 ms ─────┤                     frame 0
                     ├───── 25 ms ─────┤              frame 1, 10 ms later
                            ├───── 25 ms ─────┤       frame 2
    a frame   x Hann window ─ FFT ─ squares ─ 40 triangles ─ log ─▶ 40 numbers

Triangles (Davis and Mermelstein 1980): a band begins at the middle of the band before, has its peak at its own middle
and ends at that of the next. Middles are equally spaced in mel, mel(f) = 2595 log10(1 + f / 700), perceived pitch:
about linear up to 700 Hz, logarithmic above.

Half a second at 8,000 samples a second: a frame has 200 samples and begins 80 after the one before, so there are
1 + (4000 - 200) // 80 = 48; an FFT of 256 has a bin each 31.25 Hz; the bands' middles are 33, 68, 105, ... 3,787 Hz.
Mean and standard deviation are the recording's own, which removes loudness and the microphone's response.

Windows: each is a frame with its context on both sides. 12 frames, 3 windows, context 2:

    frame      0  1  2  3  4  5  6  7  8  9 10 11
    window 0   └─────●─────┘                          frames 0 1 2 3 4: the middle one is that of the first third
    window 1               └─────●─────┘              frames 4 5 6 7 8
    window 2                           └─────●──┘     frames 8 9 10 11 11: past an end its outer frame is repeated

So a network of frames (PCL-DNN 5.3: CD-DNN) takes a recording of any length. Augmentations:

    shift   a random position of each window's middle frame in its stretch, the same for all windows
    mask    shift, with a stretch of bands and one of frames set to zero (SpecAugment, Park et al. 2019)
"""

from __future__ import annotations

import io
import math
import wave
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from unisono.data.kinds import SampleKind, SampleTransform
from unisono.data.order import CounterRNG
from unisono.errors import DecodeError

if TYPE_CHECKING:
    import torch

    from unisono.data.options import DataOptions
    from unisono.data.pack.index import Index
    from unisono.data.pack.packing import PackOptions


MIN_RATE, MAX_RATE = 100, 1_000_000
"""Range of samples a second. Other rates occur in damaged files and would make frames empty or endless."""


def read_wav(file: bytes | memoryview) -> tuple[NDArray[np.int16], int]:
    """Return the samples, int16, shape (samples, channels), and the samples a second.

    Raises DecodeError if the bytes are no wav file, are truncated, or have other than 16-bit samples or an odd rate.
    """
    try:
        with wave.open(io.BytesIO(file)) as recording:
            frames, channels, rate = recording.getnframes(), recording.getnchannels(), recording.getframerate()
            if (width := recording.getsampwidth()) != 2:
                raise DecodeError(f"its samples have {8 * width} bits; only 16 bits are supported")
            samples = recording.readframes(frames)
    except (wave.Error, EOFError, RuntimeError) as error:  # RuntimeError: a chunk ends outside the file
        raise DecodeError(f"it is no wav file: {error}") from error
    nbytes = frames * width * channels
    if frames == 0 or len(samples) < nbytes:
        raise DecodeError(f"it has {len(samples)} of {nbytes} bytes of audio")
    if not MIN_RATE <= rate <= MAX_RATE:
        raise DecodeError(f"it has {rate} samples a second; {MIN_RATE} to {MAX_RATE} are supported")
    return np.frombuffer(samples, np.int16).reshape(-1, channels), rate  # wave returns this machine's byte order


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


MASK_DIVISOR = 4
"""Largest mask: 1 / MASK_DIVISOR of the bands, or of the frames."""

Stretch = tuple[int, int]
"""Stretch of bands or frames: the first, and the one after the last."""


@dataclass(frozen=True)
class AudioWindows:
    """Windows of one recording around these frames, with a stretch of bands and one of frames masked."""

    middles: tuple[int, ...]
    bands: Stretch = (0, 0)
    frames: Stretch = (0, 0)


def choose_windows(options: DataOptions, frames: int, random: CounterRNG | None) -> AudioWindows:
    """Return the windows of a recording of `frames` frames: with random numbers in training, without in validation.

    Each has its middle in one of as many stretches of equal length, all at the same position of their stretches.
    """
    position = 0.5 if random is None or options.augment == "none" else random.random()
    positions = ((window + position) * frames / options.windows for window in range(options.windows))
    middles = tuple(min(frames - 1, int(middle)) for middle in positions)  # rounding may lead to the end
    if random is None or options.augment != "mask":
        return AudioWindows(middles)
    return AudioWindows(middles, _mask(BANDS, random), _mask(frames, random))


def _mask(length: int, random: CounterRNG) -> Stretch:
    """Return a stretch of random length, up to 1 / MASK_DIVISOR of `length`, at a random position."""
    wide = int(random.random() * (length // MASK_DIVISOR + 1))
    first = int(random.random() * (length - wide + 1))
    return first, first + wide


INT16_SCALE = 32768
"""Divisor that scales 16-bit samples to [-1, 1)."""

MIN_STD = 0.01
"""Smallest standard deviation by which a band is divided: a constant band stays constant."""


class AudioTransform:
    """Transform of recordings to network inputs, for one thread."""

    def __init__(self, options: DataOptions) -> None:
        """Prepare inputs of shape (windows, BANDS * (2 context + 1)): the frames of a window one after the other."""
        self.shape = options.windows, BANDS * (2 * options.context + 1)
        self._options = options
        self._around = np.arange(-options.context, options.context + 1)
        self._spectrum_of = cache(Spectrum)

    def into(self, out: torch.Tensor, file: memoryview, random: CounterRNG | None) -> None:
        """Convert one recording into `out`, (windows, numbers), float32."""
        samples, rate = read_wav(file)
        frames = normalised(self._spectrum_of(rate).frames(samples.mean(axis=1, dtype=np.float32) / INT16_SCALE))
        windows = choose_windows(self._options, len(frames), random)
        frames[:, slice(*windows.bands)] = 0.0
        frames[slice(*windows.frames)] = 0.0
        rows = (np.array(windows.middles)[:, None] + self._around).clip(0, len(frames) - 1)
        out.numpy()[:] = frames[rows].reshape(self.shape)

    @staticmethod
    def batch(memory: torch.Tensor) -> torch.Tensor:
        """Return a batch as the network takes it: (samples, windows, numbers), unchanged."""
        return memory


def normalised(frames: Frames) -> Frames:
    """Return the frames with each band normalised to mean 0 and, from MIN_STD on, standard deviation 1."""
    mean, std = frames.mean(axis=0, dtype=np.float64), frames.std(axis=0, dtype=np.float64)
    scaled: Frames = ((frames - mean) / np.maximum(std, MIN_STD)).astype(np.float32)
    return scaled


class AudioKind(SampleKind):
    """Recordings. Each is normalised by itself, so a pack of them has no mean and std."""

    plural = "audio"
    column = "audio"
    endings = (".wav",)
    class_in_name = True
    augments = ("none", "shift", "mask")

    def is_signed(self, sample: bytes) -> bool:
        return sample[:4] == b"RIFF" and sample[8:12] == b"WAVE"  # WebP images are RIFF files, too

    def encode(self, sample: bytes, options: PackOptions) -> bytes:  # noqa: ARG002  recordings stay as they are
        """Return the file unchanged, after it has been read. Raises DecodeError if it is no wav file of 16 bits."""
        read_wav(sample)
        return sample

    def transform(self, index: Index, options: DataOptions) -> Callable[[], SampleTransform]:  # noqa: ARG002
        return partial(AudioTransform, options)
