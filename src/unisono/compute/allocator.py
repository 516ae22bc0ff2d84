"""Release of memory that glibc keeps after it is freed (launch.MALLOC_ENVIRONMENT), for example after a peak."""

from __future__ import annotations

import ctypes


def release_free_memory() -> bool:
    """Return free memory to the system. Return True if this C library can do so (glibc's `malloc_trim`)."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "malloc_trim"):
        return False
    library.malloc_trim(0)
    return True
