"""The device guard of `pretend`, through which PyTorch's C++ asks for devices."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import torch

from unisono.testing.pretend_device import HERE, KIND, device_count, synchronize


class _Guard(torch._C._acc.DeviceGuard):
    kept: Any

    def type_(self) -> Any:
        return KIND


def device_guard() -> Any:
    """Return a device guard that knows the devices.

    PyTorch asks Python for the type of a guard alone, and takes it that there is one device. Its virtual functions are
    in the table to which the C++ object points, in the order of PyTorch's header; a copy of the table has ours instead.
    """
    guard, word, kind = _Guard(), ctypes.c_void_p, int(KIND)
    header = Path(torch.__file__).parent / "include/c10/core/impl/DeviceGuardImplInterface.h"
    names = re.findall(r"^\s*virtual [\w:*& ]+?[ *](\w+)\(", header.read_text(), re.MULTILINE)

    def set_device(_: int, device: int) -> None:
        if device >> 8 < device_count():  # a device without an index has 255
            HERE.device = device >> 8

    def exchange(this: int, device: int) -> int:
        before: int = HERE.device << 8 | kind
        set_device(this, device)
        return before

    setter = ctypes.CFUNCTYPE(None, word, ctypes.c_uint16)(set_device)
    ours: dict[str, Any] = {
        # not in Python: a collection of garbage in there may free a tensor, which asks again and gets no answer
        "type": ctypes.CFUNCTYPE(ctypes.c_int8, word)(lambda _: kind),
        "deviceCount": ctypes.CFUNCTYPE(ctypes.c_int8, word)(lambda _: device_count()),
        "getDevice": ctypes.CFUNCTYPE(ctypes.c_uint16, word)(lambda _: HERE.device << 8 | kind),
        "exchangeDevice": ctypes.CFUNCTYPE(ctypes.c_uint16, word, ctypes.c_uint16)(exchange),
        "setDevice": setter,
        "uncheckedSetDevice": setter,
        "synchronizeDevice": ctypes.CFUNCTYPE(None, word, ctypes.c_int8)(lambda _, index: synchronize(index)),
    }
    size = ctypes.sizeof(word)
    place = word.from_address(id(guard) + 2 * size).value or 0  # a Python object of pybind11 begins with three words
    table = (word.from_address(place).value or 0) - 2 * size  # two words precede the functions, two destructors follow
    copy = (word * (len(names) + 4)).from_buffer_copy((word * (len(names) + 4)).from_address(table))
    for name, function in ours.items():
        copy[2 + names.index(name)] = ctypes.cast(function, word).value
    word.from_address(place).value = ctypes.addressof(copy) + 2 * size
    guard.kept = (ours, copy)  # for as long as PyTorch has the guard
    return guard
