import os
from math import inf
from pathlib import Path
from types import SimpleNamespace

import pytest

from unisono.data.storage import free_memory
from unisono.data.storage.free_memory import check_free_memory, free_bytes
from unisono.errors import PackError

GIGABYTE = 10**9


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node with 3 MB free, and folders for what a group of processes, and one within it, may take."""
    (tmp_path / "meminfo").write_text(
        "MemTotal:        9000 kB\nMemFree:         1000 kB\nMemAvailable:    3000 kB\nHugePages_Total:       0\n"
    )
    (tmp_path / "own").write_text("9:devices:/elsewhere\n0::/job/step\n")
    (tmp_path / "groups/job/step").mkdir(parents=True)
    monkeypatch.setattr(free_memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(free_memory, "OWN_GROUP", tmp_path / "own")
    monkeypatch.setattr(free_memory, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(free_memory, "SHARED", tmp_path)
    return tmp_path / "groups"


def limit(group: Path, most: str, taken: int, files: int) -> None:
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.current").write_text(f"{taken}\n")
    (group / "memory.stat").write_text(f"anon {taken - files}\nactive_file 1000\ninactive_file {files - 1000}\n")


def check(*seats: tuple[int, int, float]) -> None:
    """As if the ranks had told their node, what they need, and what is free."""
    told = [(*seat, inf) for seat in seats]
    check_free_memory(SimpleNamespace(node=0, all_gather_object=lambda own: told), 0)


@pytest.mark.parametrize("most", ["max", "90000000"])
def test_what_the_node_has_is_free(node: Path, most: str) -> None:
    assert free_bytes() == 3000 * 1024
    limit(node / "job", most, 5000, 2000)
    assert free_bytes() == 3000 * 1024


@pytest.mark.parametrize("group", ["", "job", "job/step"])
def test_a_group_of_processes_has_what_is_left_below_its_limit_and_that_of_each_around_it(
    node: Path, group: str
) -> None:
    limit(node, "max", 2_000_000, 1000)
    limit(node / "job", "2500000", 500_000, 1000)
    limit(node / "job/step", "max", 500_000, 1000)
    limit(node / group, "2000000", 500_000, 1000)
    assert free_bytes() == 1_501_000


def test_page_cache_counts_as_free(node: Path) -> None:
    limit(node / "job/step", "2000000", 1_900_000, 1_800_000)
    assert free_bytes() == 1_900_000


@pytest.mark.parametrize("group", ["", "slurm", "slurm/job"])
def test_groups_of_version_1_have_limits_too(node: Path, group: str) -> None:
    """In a container, the folder of the group may be the root of what is seen."""
    (node.parent / "own").write_text("11:cpu,memory:/slurm/job\n1:name=systemd:/x\n0::/\n")
    (node / "memory/slurm/job").mkdir(parents=True)
    for each, most in (("", 9223372036854771712), (group, 2_000_000)):
        folder = node / "memory" / each
        (folder / "memory.limit_in_bytes").write_text(f"{most}\n")
        (folder / "memory.usage_in_bytes").write_text("500000\n")
        (folder / "memory.stat").write_text(
            "active_file 1\ninactive_file 1\ntotal_active_file 600\ntotal_inactive_file 400\n"
        )
    assert free_bytes() == 1_501_000


def test_of_memory_that_is_shared_there_is_no_more_than_its_file_system_has(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=3, f_frsize=4096))
    assert free_bytes(shared=True) == 3 * 4096
    assert free_bytes() == 3000 * 1024


def test_nothing_is_refused_without_meminfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_memory, "MEMINFO", tmp_path / "none")
    assert free_bytes() == inf
    check_free_memory(SimpleNamespace(node=0, all_gather_object=lambda own: [own, own]), 1 << 60)


def test_a_node_is_full_when_its_ranks_together_need_more_than_it_has() -> None:
    check((0, 3 * GIGABYTE, 6 * GIGABYTE), (0, 3 * GIGABYTE, 6 * GIGABYTE), (1, 5 * GIGABYTE, inf))
    with pytest.raises(PackError, match=r"node 1 has 5\.0 GB of memory free, but its ranks would hold 6\.0 GB"):
        check(*((node, 3 * GIGABYTE, (9 - 4 * node) * GIGABYTE) for node in (0, 1, 0, 1)))
    with pytest.raises(PackError, match=r"node 0 has 5\.0 GB"):
        check((0, 3 * GIGABYTE, 7 * GIGABYTE), (0, 3 * GIGABYTE, 5 * GIGABYTE))
