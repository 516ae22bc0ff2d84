"""Properties of the processor, read from /proc/cpuinfo on Linux; elsewhere only its name."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")

TILES_FLAG, VECTORS_FLAGS = "amx_bf16", ("avx512_bf16", "bf16")
"""Names of CPU flags for bfloat16 arithmetic: in tiles (Intel's AMX); in vectors (x86, and ARM's)."""


@dataclass(frozen=True)
class Processor:
    """Name of a processor, and its units for bfloat16."""

    name: str
    tiles: bool = False
    vectors: bool = False

    @property
    def bfloat16(self) -> bool:
        """True where bfloat16 is faster than float32."""
        return self.tiles or self.vectors


def processor() -> Processor:
    """Return the processor that this process runs on."""
    return parse(CPUINFO.read_text()) if CPUINFO.is_file() else Processor(platform.processor() or platform.machine())


def parse(cpuinfo: str) -> Processor:
    """Return the processor described by the text of /proc/cpuinfo.

    >>> parse("model name : Xeon\\nflags : avx2 amx_bf16\\n")
    Processor(name='Xeon', tiles=True, vectors=False)
    """
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    name = fields.get("model name") or platform.machine()
    return Processor(name, TILES_FLAG in flags, any(flag in flags for flag in VECTORS_FLAGS))
