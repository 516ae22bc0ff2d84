"""Windows evenly spread over a recording: each is a frame with its context on both sides.

    12 frames, 3 windows, context 2

    frame      0  1  2  3  4  5  6  7  8  9 10 11
    window 0   └─────●─────┘                          frames 0 1 2 3 4: the middle one is that of the first third
    window 1               └─────●─────┘              frames 4 5 6 7 8
    window 2                           └─────●──┘     frames 8 9 10 11 11: past an end its outer frame is repeated

So a network of frames (PCL-DNN 5.3: CD-DNN) takes a recording of any length. Augmentations:

    shift   a random position of each window's middle frame in its stretch, the same for all windows
    mask    shift, with a stretch of bands and one of frames set to zero (SpecAugment, Park et al. 2019)
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.data.audio.spectrum import BANDS
from unisono.data.counter_rng import CounterRNG

AUGMENTS = ("none", "shift", "mask")
"""Augmentations of recordings."""

MASK_DIVISOR = 4
"""Largest mask: 1 / MASK_DIVISOR of the bands, or of the frames."""

MIDDLE = 0.5

Stretch = tuple[int, int]
"""Stretch of bands or frames: the first, and the one after the last."""


@dataclass(frozen=True)
class AudioOptions:
    """Options of audio inputs, (windows, BANDS * (2 context + 1)): the frames of a window one after the other."""

    windows: int
    context: int
    """Frames before the middle frame of a window, and as many after it."""
    augment: str = "none"

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the network input of a recording."""
        return self.windows, BANDS * (2 * self.context + 1)


@dataclass(frozen=True)
class AudioWindows:
    """Windows of one recording around these frames, with a stretch of bands and one of frames masked."""

    middles: tuple[int, ...]
    bands: Stretch = (0, 0)
    frames: Stretch = (0, 0)


def choose_windows(options: AudioOptions, frames: int, random: CounterRNG | None) -> AudioWindows:
    """Return the windows of a recording of `frames` frames: with random numbers in training, without in validation."""
    if random is None or options.augment == "none":
        return AudioWindows(_middles(options.windows, frames, MIDDLE))
    middles = _middles(options.windows, frames, random.random())
    if options.augment == "shift":
        return AudioWindows(middles)
    return AudioWindows(middles, _mask(BANDS, random), _mask(frames, random))


def _middles(windows: int, frames: int, position: float) -> tuple[int, ...]:
    """Return one frame from each of `windows` stretches of equal length, at `position` in [0, 1) of its stretch."""
    positions = ((window + position) * frames / windows for window in range(windows))
    return tuple(min(frames - 1, int(position)) for position in positions)  # rounding may lead to the end


def _mask(length: int, random: CounterRNG) -> Stretch:
    """Return a stretch of random length, up to 1 / MASK_DIVISOR of `length`, at a random position."""
    wide = int(random.random() * (length // MASK_DIVISOR + 1))
    first = int(random.random() * (length - wide + 1))
    return first, first + wide
