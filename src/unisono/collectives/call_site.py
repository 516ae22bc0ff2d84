"""Call site: the file and the line of the main thread in the user's program, outside of unisono, PyTorch and Python."""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

PACKAGE_FOLDER = str(Path(__file__).parents[1]) + "/"

LIBRARY_FOLDERS = tuple(
    str(Path(sysconfig.get_path(name))) + "/" for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
)


def call_site() -> str:
    """Return FILE:LINE of the main thread in the user's program; of a library if no frame is in the program."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    innermost = frame
    while frame is not None:
        if is_user_code(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "" if innermost is None else f"{innermost.f_code.co_filename}:{innermost.f_lineno}"


def is_outermost(function: Callable[..., object]) -> bool:
    """Return True if `function` is the outermost frame of the main thread."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame is not None and frame.f_code is function.__code__


def is_user_code(file: str) -> bool:
    """Return True if a file belongs to the program that is run, not to a library."""
    return not file.startswith((PACKAGE_FOLDER, *LIBRARY_FOLDERS, "<frozen"))
