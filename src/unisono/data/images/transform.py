"""Transform of images to network inputs: decode, crop, scale, mirror and normalise, in channels-last memory.

    bytes ─ header ─▶ width, height ─ decision ─▶ crop, mirrored, shift ─ decode ─▶ uint8, the crop
    the crop ─ resize ─▶ size x size ─ mirror, shift ─ (x / 255 - mean) / std ─▶ float32
    the mean image, if it is asked for ─ crop, resize, mirror, shift alike ─┘

A crop at least twice as large as wanted is resized by area means, any other by bilinear interpolation.
"""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from unisono.data.images.codec import ImageDecoder, RawDecoder
from unisono.data.kinds.image import MEAN_SIDE, ImageAugmentation, ImageHeader, ImageOptions, choose_augmentation
from unisono.data.order import CounterRNG

WHITE = 255.0

BYTES_AT_ONCE = 1 << 20
"""Bytes of an image that are normalised at once, in float32: few enough for the core's second cache."""


class ImageTransform:
    """Transform of images to network inputs, for one thread."""

    def __init__(self, options: ImageOptions, decoder: ImageDecoder | RawDecoder) -> None:
        """Create the transform. `decoder` is that of image files or of raw images, and this thread's own."""
        self.shape = options.size, options.size, options.channels
        self._options, self._decoder = options, decoder
        row = options.size * options.channels
        std = torch.tensor(options.std).repeat(options.size)
        self._rows_at_once = max(1, min(options.size, BYTES_AT_ONCE // (4 * row)))
        self._scale = (1 / (WHITE * std)).reshape(1, row)
        self._shift = (-torch.tensor(options.mean).repeat(options.size) / std).expand(options.size, row)
        mean_image = np.array(options.mean_image, np.float32).reshape(-1, MEAN_SIDE, options.channels)
        self._mean_image = np.divide(-mean_image, np.array(options.std, np.float32))  # empty without one

    def into(self, out: torch.Tensor, file: memoryview, random: CounterRNG | None) -> None:
        """Convert one image into `out`, (size, size, channels), float32.

        Without `random` it is converted as in validation. Raises DecodeError if the bytes are no image.
        """
        size = self._options.size
        header = self._decoder.header(file)
        augmentation = choose_augmentation(self._options, header.width, header.height, random)
        pixels = self._decoder.decode(augmentation.box, size)
        height, width = pixels.shape[:2]
        if (height, width) != (size, size):
            interpolation = cv2.INTER_AREA if min(height, width) >= 2 * size else cv2.INTER_LINEAR
            pixels = np.asarray(cv2.resize(pixels, (size, size), interpolation=interpolation), np.uint8)
        if augmentation.mirrored:
            pixels = np.asarray(cv2.flip(pixels, 1), np.uint8)
        if augmentation.right or augmentation.down:
            pixels = shifted(pixels.reshape(size, size, -1), augmentation.right, augmentation.down)
        shift = self._shift if not len(self._mean_image) else self._shift_of(augmentation, header)
        self._normalise(out.view(size, -1), torch.from_numpy(pixels.reshape(size, -1)), shift)

    def _shift_of(self, how: ImageAugmentation, header: ImageHeader) -> torch.Tensor:
        """Return the mean image, negative and over `std`, as it lies below an image's crop: (size, size x channels)."""
        size, box = self._options.size, how.box
        begin, width = (MEAN_SIDE * one / header.width for one in (box.x, box.width))
        top, height = (MEAN_SIDE * one / header.height for one in (box.y, box.height))
        across, down = (-width if how.mirrored else width) / size, height / size
        left = begin + width * how.mirrored
        # pixels are at their centres: the first of 4 pixels over 2 of the mean image is at -0.25 there
        place = np.array([[across, 0, left + (across - 1) / 2], [0, down, top + (down - 1) / 2]])
        way = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
        below = cv2.warpAffine(self._mean_image, place, (size, size), flags=way, borderMode=cv2.BORDER_REPLICATE)
        return torch.from_numpy(shifted(below.reshape(size, size, -1), how.right, how.down).reshape(size, -1))

    def _normalise(self, out: torch.Tensor, pixels: torch.Tensor, shift: torch.Tensor) -> None:
        """Write normalised pixels to `out`, all of shape (size, size x channels).

        The second pass is in place, so that no other memory passes through the cache.
        """
        for first in range(0, len(out), self._rows_at_once):
            rows = out[first : first + self._rows_at_once]
            rows.copy_(pixels[first : first + self._rows_at_once])
            torch.addcmul(shift[first : first + self._rows_at_once], rows, self._scale, out=rows)

    @staticmethod
    def batch(memory: torch.Tensor) -> torch.Tensor:
        """Return a batch as the network takes it: (samples, channels, size, size), in channels-last memory."""
        return memory.permute(0, 3, 1, 2)


def shifted(pixels: NDArray[Any], right: int, down: int) -> NDArray[Any]:
    """Return the image moved by `right` and `down` pixels; pixels that enter are 0, black."""
    height, width, _ = pixels.shape
    out = np.zeros_like(pixels)
    into = out[max(0, down) : height + min(0, down), max(0, right) : width + min(0, right)]
    into[:] = pixels[max(0, -down) : height + min(0, -down), max(0, -right) : width + min(0, -right)]
    return out
