"""Compiled code: the module `_steps`, where the installation had a compiler; else None, and Python plays all steps.

    installation   *.c, *.h ─▶ _steps, which has their digest
    import         the same digest of *.c, *.h ─▶ the module          another ─▶ UsageError

Rows and connections lie in memory as both sides describe them. An editable installation has new Python code at once,
and new compiled code only once it is compiled: without the digest it would wait forever, or sum other numbers.
"""

from __future__ import annotations

import hashlib
import importlib
from pathlib import Path
from typing import Any

from unisono.errors import UsageError

FOLDER = Path(__file__).parent


def digest_of(folder: Path) -> str:
    """Return the digest of the C sources in a folder, as `hatch_build.py` makes it; an empty text without sources."""
    sources = sorted(folder.glob("*.[ch]"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest() if sources else ""


def check_digest(built: str, present: str) -> None:
    """Raise UsageError if compiled code was made of other sources than those that are present, if any."""
    if present and built != present:
        raise UsageError(
            f"the compiled code in {FOLDER} was made of other sources than those beside it, as after an update of an "
            "editable installation: run `python hatch_build.py`, or install it again"
        )


compiled: Any = None
"""The module, or None."""

try:
    compiled = importlib.import_module("unisono.transports._steps")
except ImportError:  # installed without a compiler
    pass
else:
    check_digest(getattr(compiled, "SOURCES", "unknown"), digest_of(FOLDER))
