"""Position of a program: the file and the line of its main thread outside of unisono, PyTorch and Python."""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

OWN = str(Path(__file__).parents[1]) + "/"

INSTALLED = tuple(
    str(Path(sysconfig.get_path(name))) + "/" for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
)


def where() -> str:
    """Return FILE:LINE of the main thread in the program; in a library if no frame is in the program."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    innermost = frame
    while frame is not None:
        if is_program(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "" if innermost is None else f"{innermost.f_code.co_filename}:{innermost.f_lineno}"


def is_in(function: Callable[..., object]) -> bool:
    """Return True if `function` is the outermost frame of the main thread."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame is not None and frame.f_code is function.__code__


def is_program(file: str) -> bool:
    """Return True if a file belongs to the program that is run, not to a library."""
    return not file.startswith((OWN, *INSTALLED, "<frozen"))
