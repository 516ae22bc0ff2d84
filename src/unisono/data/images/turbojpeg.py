"""Binding of libjpeg-turbo's TurboJPEG interface, version 3, by ctypes: its calls let other threads run.

The library comes with the `turbojpeg` wheel or with the system. A `JpegDecoder` belongs to one thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from importlib import metadata
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.data.kinds.image import ImageHeader, Part
from unisono.errors import DecodeError

DECOMPRESS = 1
WIDTH, HEIGHT, SUBSAMPLING, COLORS = 5, 6, 4, 8
RGB, GREY = 0, 6
"""Pixel formats of decoded images."""

CMYK, YCCK = 3, 4
"""Colour spaces of JPEG files that Pillow decodes."""

BLOCKS = {0: 8, 1: 16, 2: 16, 3: 8, 4: 8, 5: 32, 6: 8}
"""Width of a file's blocks in pixels, by its subsampling: a part can begin only at a block."""


SYSTEMS = ("libturbojpeg.so.0", "libturbojpeg.dylib")
"""Names of the system's library. A search for it would start processes, which is not allowed once MPI runs."""


class _Region(ctypes.Structure):
    _fields_ = (("x", ctypes.c_int), ("y", ctypes.c_int), ("w", ctypes.c_int), ("h", ctypes.c_int))


class _ScalingFactor(ctypes.Structure):
    _fields_ = (("num", ctypes.c_int), ("denom", ctypes.c_int))


@cache
def library() -> ctypes.CDLL | None:
    """Return libjpeg-turbo 3 or newer; None if it is not installed."""
    for name in _paths():
        try:
            found = ctypes.CDLL(name)
        except OSError:
            continue
        if hasattr(found, "tj3SetCroppingRegion"):
            return _declare(found)
    return None


def _paths() -> list[str]:
    try:
        files = metadata.files("turbojpeg") or []
    except metadata.PackageNotFoundError:
        files = []
    paths = [str(file.locate()) for file in files if file.name.startswith("libturbojpeg")]
    return paths + list(SYSTEMS)


def _declare(found: ctypes.CDLL) -> ctypes.CDLL:
    handle, number, memory = ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p
    shapes: dict[str, tuple[Any, list[Any]]] = {
        "tj3Init": (handle, [number]),
        "tj3Destroy": (None, [handle]),
        "tj3Get": (number, [handle, number]),
        "tj3DecompressHeader": (number, [handle, ctypes.c_char_p, ctypes.c_size_t]),
        "tj3SetScalingFactor": (number, [handle, _ScalingFactor]),
        "tj3SetCroppingRegion": (number, [handle, _Region]),
        "tj3Decompress8": (number, [handle, ctypes.c_char_p, ctypes.c_size_t, memory, number, number]),
        "tj3GetErrorStr": (ctypes.c_char_p, [handle]),
        "tj3GetErrorCode": (number, [handle]),
    }
    for name, (result, arguments) in shapes.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    return found


class JpegDecoder:
    """Decoder of parts of JPEG files, for one thread. Of a truncated file it decodes what there is."""

    def __init__(self) -> None:
        """Create the decoder. Raises DecodeError if libjpeg-turbo 3 is not installed."""
        found = library()
        if found is None:
            raise DecodeError("there is no libjpeg-turbo 3 here: pip install turbojpeg")
        self._library = found
        self._handle = found.tj3Init(DECOMPRESS)
        self._get: Callable[[Any, int], int] = found.tj3Get

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.tj3Destroy(self._handle)

    def header(self, file: bytes) -> ImageHeader | None:
        """Return the header of the file; None if it is CMYK or YCCK, has unknown subsampling, or causes a warning.

        Raises DecodeError if the file is no JPEG.
        """
        handle, get = self._handle, self._get
        if self._library.tj3DecompressHeader(handle, file, len(file)):
            self._fail_unless_warned()
            return None
        colors, block = get(handle, COLORS), BLOCKS.get(get(handle, SUBSAMPLING))
        if colors in (CMYK, YCCK) or block is None:
            return None
        return ImageHeader(get(handle, WIDTH), get(handle, HEIGHT), block)

    def decode(self, file: bytes, part: Part, grey: bool) -> NDArray[np.uint8]:
        """Return a part of the image whose header was read last: (height, width, 3), RGB, or 1 channel if `grey`.

        `part.x` is a multiple of the header's block over `part.shrink`. Raises DecodeError if it cannot be decoded.
        """
        shape = (part.height, part.width, 1 if grey else 3)
        out = np.empty(shape, np.uint8)
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
