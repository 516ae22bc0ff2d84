"""Raw images: uint8 values of one shape, (height, width) or (height, width, channels)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from unisono.data.images.augmentation import AUGMENTS, image_options
from unisono.data.kinds import IMAGE
from unisono.data.kinds.kind import Bytes, SampleKind, SampleTransform, TransformOptions

if TYPE_CHECKING:
    from unisono.data.pack.index import Index
    from unisono.data.pack.options import PackOptions


class RawKind(SampleKind):
    """Raw images, whose shape the pack has."""

    plural = "images"
    column = "image"
    file_kind = IMAGE
    augments = AUGMENTS

    def encode(self, sample: bytes, options: PackOptions) -> bytes:  # noqa: ARG002  values stay as they are
        """Return the sample unchanged."""
        return sample

    def transform(self, index: Index, options: TransformOptions) -> Callable[[], SampleTransform]:
        """Return the function that makes the transform: crop, scale, normalise."""
        from unisono.data.images.decode import RawDecoder  # noqa: PLC0415  recipes are checked without PyTorch
        from unisono.data.images.transform import ImageTransform  # noqa: PLC0415

        found, shape = image_options(index, options), index.about.shape
        assert shape is not None, "raw samples have a shape"
        return lambda: ImageTransform(found, RawDecoder(shape))

    def pixels(self, sample: Bytes, shape: tuple[int, ...] | None) -> Bytes | None:
        """Return the values, (height, width, channels)."""
        assert shape is not None, "raw samples have a shape"
        return sample.reshape(*shape[:2], -1)
