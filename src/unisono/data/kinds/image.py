"""Images: files, in a pack JPEGs and PNGs, others are encoded again; and raw images, uint8 values of one shape."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING

from unisono.data.images.augmentation import AUGMENTS, image_options
from unisono.data.kinds import IMAGE
from unisono.data.kinds.kind import Bytes, SampleKind, SampleTransform, TransformOptions

if TYPE_CHECKING:
    from unisono.data.pack.index import Index
    from unisono.data.pack.packing import PackOptions


MIN_SIDE = 64
"""Pixels of the short side that are enough to measure an image: larger JPEGs may be decoded smaller."""


class ImageKind(SampleKind):
    """Image files."""

    plural = "images"
    column = "image"
    endings = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
    augments = AUGMENTS
    old_name = "picture"

    def encode(self, sample: bytes, options: PackOptions) -> bytes:
        """Return the file, or a JPEG of it with the short side of `options`."""
        from unisono.data.images.codec import encode_image  # noqa: PLC0415  Pillow is of the extra `data`

        return encode_image(sample, options.short_side, options.quality)

    def transform(self, index: Index, options: TransformOptions) -> Callable[[], SampleTransform]:
        """Return the function that makes the transform: decode, crop, scale, normalise."""
        from unisono.data.images.codec import ImageDecoder  # noqa: PLC0415  recipes are checked without PyTorch
        from unisono.data.images.transform import ImageTransform  # noqa: PLC0415

        found = image_options(index, options)
        return lambda: ImageTransform(found, ImageDecoder(found.channels))

    def pixels(self, sample: Bytes, shape: tuple[int, ...] | None) -> Bytes | None:  # noqa: ARG002  files have a size
        """Return the decoded pixels, (height, width, 1 if grey or else 3)."""
        from unisono.data.images.codec import GREY_MODES, decode_image, pixels_of  # noqa: PLC0415

        image = decode_image(sample.tobytes(), rotate=False, min_side=MIN_SIDE)
        return pixels_of(image, "L" if image.mode in GREY_MODES else "RGB")

    def is_grey(self, sample: Bytes) -> bool:
        """Return True if the image's header has a grey mode."""
        from PIL import Image  # noqa: PLC0415

        from unisono.data.images.codec import GREY_MODES  # noqa: PLC0415

        with Image.open(io.BytesIO(sample.tobytes())) as image:
            return image.mode in GREY_MODES


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
        from unisono.data.images.codec import RawDecoder  # noqa: PLC0415  recipes are checked without PyTorch
        from unisono.data.images.transform import ImageTransform  # noqa: PLC0415

        found, shape = image_options(index, options), index.about.shape
        assert shape is not None, "raw samples have a shape"
        return lambda: ImageTransform(found, RawDecoder(shape))

    def pixels(self, sample: Bytes, shape: tuple[int, ...] | None) -> Bytes | None:
        """Return the values, (height, width, channels)."""
        assert shape is not None, "raw samples have a shape"
        return sample.reshape(*shape[:2], -1)
