"""Garbage collection paused while a command computes: a quarter of the time of a plan on 40,960 nodes.

Each full collection walks the 170,000 objects that `import torch` makes, and the ranks and rounds of large schedules.
A command that plans, prices or simulates frees its memory without: only cycles of references stay until it ends.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collection() -> Iterator[None]:
    """Pause Python's garbage collection inside; reference counts still free memory.

    What is alive at the end is walked by no later collection: the first one would come at once, and take a second.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.freeze()
            gc.enable()
