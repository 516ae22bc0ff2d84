from pathlib import Path
from types import SimpleNamespace

import pytest

from unisono.data.memory import room
from unisono.data.memory.room import check_room, free_bytes
from unisono.errors import PackError


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node with 3 MB free, and a folder for what its group of processes may take."""
    (tmp_path / "meminfo").write_text(
        "MemTotal:        9000 kB\nMemFree:         1000 kB\nMemAvailable:    3000 kB\nHugePages_Total:       0\n"
    )
    monkeypatch.setattr(room, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(room, "GROUP", tmp_path / "group")
    (tmp_path / "group").mkdir()
    return tmp_path


def limit(node: Path, most: str, taken: int, cached: int) -> None:
    (node / "group/memory.max").write_text(f"{most}\n")
    (node / "group/memory.current").write_text(f"{taken}\n")
    (node / "group/memory.stat").write_text(f"anon {taken - cached}\nactive_file 1000\ninactive_file {cached - 1000}\n")


def test_what_the_node_has_is_free(node: Path) -> None:
    assert free_bytes() == 3000 * 1024
    limit(node, "max", 5000, 2000)
    assert free_bytes() == 3000 * 1024
    limit(node, "90000000", 5000, 2000)
    assert free_bytes() == 3000 * 1024


def test_a_group_of_processes_has_what_is_left_below_its_limit(node: Path) -> None:
    limit(node, "2000000", 500_000, 1000)
    assert free_bytes() == 1_501_000


def test_files_that_were_read_make_room(node: Path) -> None:
    limit(node, "2000000", 1_900_000, 1_800_000)
    assert free_bytes() == 1_900_000


def test_where_it_is_not_told_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MEMINFO", tmp_path / "none")
    assert free_bytes() is None
    check_room(SimpleNamespace(node=0, gather=lambda mine: [mine, mine]), 1 << 60)


def test_a_node_is_full_when_its_ranks_together_need_more_than_it_has() -> None:
    def check(*seats: tuple[int, int, int | None]) -> None:
        check_room(SimpleNamespace(node=0, gather=lambda mine: list(seats)), 0)

    gigabyte = 10**9
    check((0, 3 * gigabyte, 6 * gigabyte), (0, 3 * gigabyte, 6 * gigabyte), (1, 5 * gigabyte, None))
    with pytest.raises(PackError, match=r"node 1 has 5\.0 GB of memory free, but its ranks would hold 6\.0 GB"):
        check(*((node, 3 * gigabyte, (9 - 4 * node) * gigabyte) for node in (0, 1, 0, 1)))
    with pytest.raises(PackError, match="node 0 has 5"):
        check((0, 3 * gigabyte, 7 * gigabyte), (0, 3 * gigabyte, 5 * gigabyte))
