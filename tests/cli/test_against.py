"""`unisono bench collectives --against`, with this environment's own MPI as a peer: nothing is installed."""

import json
import sys
from pathlib import Path

import pytest
from tests.progress import Run
from tests.usage_errors import assert_one_line_error

from unisono.bench.peer_program import COLLECTIVES, TIMINGS
from unisono.launch import find_mpiexec


def test_every_collective_beside_a_library_and_gloo(unisono: Run, tmp_path: Path) -> None:
    installed = tmp_path / "cache" / "unisono" / "peers" / "mpich"
    (installed / "bin").mkdir(parents=True)
    (installed / "complete").touch()
    for name, program in {"mpiexec": find_mpiexec(), "python": sys.executable}.items():
        script = installed / "bin" / name
        script.write_text(f'#!/bin/sh\nexec "{program}" "$@"\n')
        script.chmod(0o755)
    named = ["--against", "mpich,gloo", "--collectives", ",".join(COLLECTIVES)]
    given = ["--ranks", "2", "--rounds", "1", "--largest", "4", "--output", "out"]
    done = unisono("bench", "collectives", *named, *given, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[:3] == [f"round 1 of 1: {name}" for name in ("ours", "mpich", "gloo")]
    assert "windows, back to back: of 7 cells" in done.stdout
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["collective"] for row in results["rows"]] == list(COLLECTIVES)
    for row in results["rows"]:
        assert set(row["us"]) - {"copy"} == {"ordinary", "windows", "mpich", "gloo"}
        assert ("copy" in row["us"]) == (row["collective"] != "barrier")
        assert all(len(us[timing]) == 1 for us in row["us"].values() for timing in TIMINGS)
    assert (tmp_path / "out" / "table.md").read_text().count("| allreduce | 4 |") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--against", "mpich,cray"], "--against mpich,cray: unknown: cray; there are mpich, openmpi, intel, gloo"),
        (["--against", ""], "--against is empty; there are mpich"),
        (["--against", "gloo", "--collectives", "gather"], "unknown: gather; there are allreduce, reduce_scatter"),
        (["--against", "gloo", "--ranks", "1"], "--ranks 1 --rounds 3: needs 2 ranks"),
        (["--against", "gloo", "--rounds", "0"], "--ranks 2 --rounds 0: needs 2 ranks and 1 round, or more"),
        (["--against", "gloo", "--rate", "1gbit"], "--rate 1gbit: not with --against"),
        (["--rounds", "4"], "--rounds 4: only with --against"),
        (["--against", "gloo", "--output", "/proc/none"], "cannot write /proc/none"),
    ],
)
def test_bad_input_starts_nothing(in_process: Run, arguments: list[str], message: str) -> None:
    assert_one_line_error(in_process("bench", "collectives", *arguments), message)


def test_ranks_of_a_launcher_are_refused(in_process: Run) -> None:
    first = in_process("bench", "collectives", "--against", "gloo", PMI_SIZE="2", PMI_RANK="0")
    assert_one_line_error(first, "--against starts every library's own mpiexec")
    second = in_process("bench", "collectives", "--against", "gloo", PMI_SIZE="2", PMI_RANK="1")
    assert (second.returncode, second.stderr) == (2, "")
