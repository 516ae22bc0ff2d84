"""Binding of libjpeg-turbo's TurboJPEG interface, version 3, by ctypes: its calls let other threads run.

The library comes with the `turbojpeg` wheel or with the system. A `JpegDecoder` belongs to one thread.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache
from importlib import metadata
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.data.kinds.image import ImageHeader, Part
from unisono.errors import DecodeError

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
def library() -> ctypes.CDLL | None:
    """Return libjpeg-turbo 3 or newer; None if it is not installed."""
    for name in _paths():
        with suppress(OSError):
            found = ctypes.CDLL(name)
            if hasattr(found, "tj3SetCroppingRegion"):
                for function, (result, *arguments) in FUNCTIONS.items():
                    getattr(found, function).restype, getattr(found, function).argtypes = result, arguments
                return found
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
        found = library()
        if found is None:
            raise DecodeError("there is no libjpeg-turbo 3 here: pip install turbojpeg")
        self._library, self._handle = found, found.tj3Init(DECOMPRESS)

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
