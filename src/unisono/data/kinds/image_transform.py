"""Transform of images to network inputs: decode, crop, scale, mirror and normalise, in channels-last memory.

    bytes ─ header ─▶ width, height ─ decision (`image.py`) ─▶ crop, mirrored, shift ─ decode ─▶ uint8, the crop
    the crop ─ resize ─▶ size x size ─ mirror, shift ─ (x / 255 - mean) / std ─▶ float32
    the mean image, if it is asked for ─ crop, resize, mirror, shift alike ─┘

JPEGs are decoded by libjpeg-turbo, through the TurboJPEG interface, version 3, by ctypes: its calls let other threads
run. The library comes with the `turbojpeg` wheel or with the system. Other formats and CMYK JPEGs are decoded by Pillow
(`image_codec.py`). Grey images get three equal channels if RGB is wanted. Images in packs were rotated by their EXIF
orientation when they were packed.

A crop at least twice as large as wanted is resized by area means, any other by bilinear interpolation.
"""

from __future__ import annotations

import ctypes
import io
from contextlib import suppress
from functools import cache
from importlib import metadata
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from unisono.data.kinds.image import (
    MEAN_SIDE,
    Box,
    ImageAugmentation,
    ImageHeader,
    ImageOptions,
    Part,
    choose_augmentation,
    part_of,
)
from unisono.data.kinds.image_codec import Pixels, damage_named, decode_image, pixels_of
from unisono.data.order import CounterRNG
from unisono.errors import DecodeError

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
        """Convert one image into `out`, (size, size, channels), float32."""
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
        begin, width = (MEAN_SIDE * extent / header.width for extent in (box.x, box.width))
        top, height = (MEAN_SIDE * extent / header.height for extent in (box.y, box.height))
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


JPEG = b"\xff\xd8"


class ImageDecoder:
    """Decoder of crops of image files, for one thread."""

    def __init__(self, channels: int) -> None:
        """Create the decoder. `channels` is 3, or 1 for grey images."""
        self._grey, self._mode = channels == 1, "L" if channels == 1 else "RGB"
        self._jpeg = JpegDecoder() if turbojpeg() else None

    def header(self, file: memoryview | bytes) -> ImageHeader:
        """Return the header of an image, whose bytes are kept until `decode`. Raises DecodeError."""
        self._file = bytes(file)
        header = self._jpeg.header(self._file) if self._jpeg is not None and self._file[:2] == JPEG else None
        if header is None:
            with damage_named():
                header = ImageHeader(*Image.open(io.BytesIO(self._file)).size)
        self._header = header
        return header

    def decode(self, box: Box, size: int) -> Pixels:
        """Return the crop `box` of the image whose header was read last, to become size x size.

        The part of a JPEG that has it is decoded at 1/2, 1/4 or 1/8 if that is large enough. Raises DecodeError if the
        image is damaged.
        """
        width, height, block = self._header
        if self._jpeg is not None and block is not None:
            part, within = part_of(box, width, height, block, size)
            with suppress(DecodeError):  # some odd files can only be decoded as a whole
                return cropped(self._jpeg.decode(self._file, part, self._grey), within)
        pixels = pixels_of(decode_image(self._file), self._mode)
        if pixels.shape[:2] != (height, width):
            decoded = f"{pixels.shape[1]} x {pixels.shape[0]}"
            raise DecodeError(f"its header says {width} x {height} pixels, but it has {decoded}")
        return cropped(pixels, box)


class RawDecoder:
    """Decoder of raw images of the shape (height, width) or (height, width, channels), uint8."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape

    def header(self, file: memoryview) -> ImageHeader:
        """Return the size, that of all images."""
        self._pixels: Pixels = np.frombuffer(file, np.uint8).reshape(*self._shape[:2], -1)
        return ImageHeader(self._shape[1], self._shape[0])

    def decode(self, box: Box, size: int) -> Pixels:  # noqa: ARG002  nothing is decoded
        """Return the crop, a view of the image's bytes."""
        return cropped(self._pixels, box)


def cropped(pixels: Pixels, box: Box) -> Pixels:
    """Return a crop of an image, as a view."""
    return pixels[box.y : box.y + box.height, box.x : box.x + box.width]


DECOMPRESS = 1
PROPERTIES = 5, 6, 4, 8
"""Numbers of a file's width, height, subsampling and colour space."""

RGB, GREY = 0, 6
"""Pixel formats of decoded images."""

CMYK, YCCK = 3, 4
"""Colour spaces of JPEG files that Pillow decodes."""

BLOCKS = {0: 8, 1: 16, 2: 16, 3: 8, 4: 8, 5: 32, 6: 8}
"""Width of a file's blocks in pixels, by its subsampling: a part can begin only at a block."""

SYSTEMS = ("libturbojpeg.so.0", "libturbojpeg.dylib")
"""Names of the system's library. A search for it would start processes, which is not allowed once MPI runs."""


HANDLE, INT, TEXT = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p


class _Region(ctypes.Structure):
    _fields_ = (("x", INT), ("y", INT), ("w", INT), ("h", INT))


class _ScalingFactor(ctypes.Structure):
    _fields_ = (("num", INT), ("denom", INT))


FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "tj3Init": (HANDLE, INT),
    "tj3Destroy": (None, HANDLE),
    "tj3Get": (INT, HANDLE, INT),
    "tj3DecompressHeader": (INT, HANDLE, TEXT, ctypes.c_size_t),
    "tj3SetScalingFactor": (INT, HANDLE, _ScalingFactor),
    "tj3SetCroppingRegion": (INT, HANDLE, _Region),
    "tj3Decompress8": (INT, HANDLE, TEXT, ctypes.c_size_t, ctypes.c_void_p, INT, INT),
    "tj3GetErrorStr": (TEXT, HANDLE),
    "tj3GetErrorCode": (INT, HANDLE),
}
"""Result and arguments of each function."""


@cache
def turbojpeg() -> ctypes.CDLL | None:
    """Return libjpeg-turbo 3 or newer; None if it is not installed."""
    for name in _paths():
        with suppress(OSError):
            library = ctypes.CDLL(name)
            if hasattr(library, "tj3SetCroppingRegion"):
                for function, (result, *arguments) in FUNCTIONS.items():
                    getattr(library, function).restype, getattr(library, function).argtypes = result, arguments
                return library
    return None


def _paths() -> list[str]:
    with suppress(metadata.PackageNotFoundError):
        files = metadata.files("turbojpeg") or []
        return [*(str(file.locate()) for file in files if file.name.startswith("libturbojpeg")), *SYSTEMS]
    return [*SYSTEMS]


class JpegDecoder:
    """Decoder of parts of JPEG files, for one thread. Of a truncated file it decodes what there is."""

    def __init__(self) -> None:
        """Create the decoder. Raises DecodeError if libjpeg-turbo 3 is not installed."""
        library = turbojpeg()
        if library is None:
            raise DecodeError("there is no libjpeg-turbo 3 here: pip install turbojpeg")
        self._library, self._handle = library, library.tj3Init(DECOMPRESS)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.tj3Destroy(self._handle)

    def header(self, file: bytes) -> ImageHeader | None:
        """Return the header of the file; None if it is CMYK or YCCK, has unknown subsampling, or causes a warning.

        Raises DecodeError if the file is no JPEG.
        """
        if self._library.tj3DecompressHeader(self._handle, file, len(file)):
            self._fail_unless_warned()
            return None
        width, height, blocks, colors = (self._library.tj3Get(self._handle, each) for each in PROPERTIES)
        return None if colors in (CMYK, YCCK) or blocks not in BLOCKS else ImageHeader(width, height, BLOCKS[blocks])

    def decode(self, file: bytes, part: Part, grey: bool) -> NDArray[np.uint8]:
        """Return a part of the image whose header was read last: (height, width, 3), RGB, or 1 channel if `grey`.

        `part.x` is a multiple of the header's block over `part.shrink`. Raises DecodeError if it cannot be decoded.
        """
        out = np.empty((part.height, part.width, 1 if grey else 3), np.uint8)
        turbo, handle = self._library, self._handle
        region = _Region(part.x, part.y, part.width, part.height)
        if (
            turbo.tj3SetCroppingRegion(handle, _Region(0, 0, 0, 0))
            or turbo.tj3SetScalingFactor(handle, _ScalingFactor(1, part.shrink))
            or turbo.tj3SetCroppingRegion(handle, region)
        ):
            self._fail()
        arguments = handle, file, len(file), out.ctypes.data, 0, GREY if grey else RGB
        if turbo.tj3Decompress8(*arguments):
            self._fail_unless_warned()
            out.fill(0)  # after a warning the rest may not have been written
            turbo.tj3Decompress8(*arguments)
        return out

    def _fail_unless_warned(self) -> None:
        if self._library.tj3GetErrorCode(self._handle):
            self._fail()

    def _fail(self) -> None:
        raise DecodeError(self._library.tj3GetErrorStr(self._handle).decode(errors="replace"))
