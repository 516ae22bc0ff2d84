"""Memory that glibc keeps when it is freed (launch.MEMORY), and that a moment of great need has left behind."""

from __future__ import annotations

import ctypes


def give_back() -> bool:
    """Return to the system what is free; whether this C library can (glibc's `malloc_trim`)."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "malloc_trim"):
        return False
    library.malloc_trim(0)
    return True
