"""What the system's files tell of a node; what they do not say stays unknown."""

from __future__ import annotations

from pathlib import Path

import pytest

from unisono.measure.system import cache_bytes, memory_bytes, read_system, simd_width
from unisono.plan.machines import NodeFacts

MEMINFO = "MemFree:  1 kB\nMemTotal:       24684100 kB\n"


def test_memory_is_that_of_the_system_or_of_its_control_group() -> None:
    assert memory_bytes(MEMINFO) == memory_bytes(MEMINFO, "max\n") == 24684100 * 1024
    assert memory_bytes(MEMINFO, "1000\n") == 1000
    assert memory_bytes("", "1000") == 0


@pytest.mark.parametrize(
    ("line", "width"),
    [
        ("flags\t\t: fpu sse avx avx2 avx512f", 16),
        ("flags\t\t: fpu sse avx avx2", 8),
        ("flags : sse sse2", 4),
        ("Features\t: fp asimd", 4),
        ("isa : rv64", 0),
    ],
)
def test_vectors_are_the_widest_of_the_flags(line: str, width: int) -> None:
    assert simd_width(f"processor : 0\n{line}\n") == width


def test_sizes_of_caches() -> None:
    assert [cache_bytes(size) for size in ("1024K", "2M", "512", "", "big")] == [1 << 20, 2 << 20, 512, 0, 0]


def test_a_root_with_files_and_one_without(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    for number, (level, kind, size) in enumerate(
        (("1", "Data", "48K"), ("2", "Unified", "1M"), ("3", "Unified", "32M"))
    ):
        folder = tmp_path / f"sys/devices/system/cpu/cpu0/cache/index{number}"
        folder.mkdir(parents=True)
        for name, text in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(f"{text}\n")
    assert read_system(tmp_path) == NodeFacts(cache_bytes=1 << 20, memory_bytes=24684100 * 1024)
    assert read_system(tmp_path / "nowhere") == NodeFacts()
