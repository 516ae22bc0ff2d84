"""Return of memory that glibc keeps after it is freed (launch.MEMORY), such as after a moment of high demand."""

from __future__ import annotations

import ctypes


def give_back() -> bool:
    """Return free memory to the system. Return True if this C library can do so (glibc's `malloc_trim`)."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "malloc_trim"):
        return False
    library.malloc_trim(0)
    return True
