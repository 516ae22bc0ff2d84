"""Recordings: wav files with 16-bit integers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from unisono.data.audio.wav import read_wav
from unisono.data.audio.windows import AUGMENTS, AudioOptions
from unisono.data.kinds.kind import SampleKind, SampleTransform, TransformOptions

if TYPE_CHECKING:
    from unisono.data.pack.index import Index
    from unisono.data.pack.options import PackOptions


class AudioKind(SampleKind):
    """Recordings. Each is normalised by itself, so a pack of them has no mean and std."""

    plural = "audio"
    column = "audio"
    endings = (".wav",)
    signature = b"RIFF"
    class_in_name = True
    augments = AUGMENTS
    old_name = "sound"

    def encode(self, sample: bytes, options: PackOptions) -> bytes:  # noqa: ARG002  recordings stay as they are
        """Return the file unchanged, after it has been read. Raises DecodeError if it is no wav file of 16 bits."""
        read_wav(sample)
        return sample

    def transform(self, index: Index, options: TransformOptions) -> Callable[[], SampleTransform]:  # noqa: ARG002
        """Return the function that makes the transform: windows of log-mel frames."""
        from unisono.data.audio.transform import AudioTransform  # noqa: PLC0415  recipes are checked without PyTorch

        return partial(AudioTransform, AudioOptions(options.windows, options.context, options.augment))
