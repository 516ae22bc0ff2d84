"""While ranks are being started, one that dies or is stopped is named, and the others end."""

from __future__ import annotations

import mmap
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.progress import Watched, settle

from unisono import startup, witness
from unisono.startup import Rank, Seen, Startup, look_below, rank_of, remove_left

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's /proc")

LAUNCHER = """
import os, subprocess, sys, time
for rank in range(3):
    environment = {**os.environ, "PMI_RANK": str(rank)}
    subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment)
input()
"""
"""Stands for one that does not mind its ranks."""


@pytest.fixture
def launcher() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", LAUNCHER], stdin=subprocess.PIPE, start_new_session=True)
    settle(lambda: look_below(process.pid), lambda seen: len(seen.ranks) == 3)
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_ranks_are_known_by_what_launchers_call_them() -> None:
    assert rank_of(b"HOME=/\0PMI_RANK=12\0") == 12
    assert rank_of(b"OMPI_COMM_WORLD_RANK=0") == 0
    assert rank_of(b"XPMI_RANK=3\0PMI_SIZE=4") is None
    assert rank_of(b"") is None


def test_ranks_below_a_launcher_are_found(launcher: subprocess.Popen[bytes]) -> None:
    seen = look_below(launcher.pid)
    assert sorted(seen.ranks) == [0, 1, 2]
    assert not seen.witness
    assert not any(rank.stopped for rank in seen.ranks.values())
    os.kill(seen.ranks[1].process, signal.SIGSTOP)
    settle(lambda: look_below(launcher.pid), lambda now: now.ranks[1].stopped)
    assert [now.stopped for _, now in sorted(look_below(launcher.pid).ranks.items())] == [False, True, False]


def look_to_the_end(looking: Startup, launcher: subprocess.Popen[bytes]) -> dict[int, Rank]:
    """Look until all ranks are gone; who was there at first."""
    looking.look()
    first = dict(look_below(launcher.pid).ranks)
    settle(lambda: looking.look() or alive(first), lambda left: not left)
    return first


def alive(ranks: dict[int, Rank]) -> list[int]:
    """Those that run; a zombie waits for its launcher."""
    states = {rank: startup._read(found.process, "stat").rpartition(b")")[2].split() for rank, found in ranks.items()}
    return [rank for rank, state in states.items() if state and state[0] != b"Z"]


def test_the_first_that_dies_is_named_and_the_others_end(
    launcher: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(startup, "GRACE", 0.3)
    looking = Startup(launcher.pid, 3, 600.0)
    looking.look()
    victim = look_below(launcher.pid).ranks[2].process
    os.kill(victim, signal.SIGKILL)
    assert sorted(look_to_the_end(looking, launcher)) == [0, 1]  # a zombie has no environment
    looking.finish(asked=False, code=9, listener=witness.Listener())
    assert f"rank 2 of 3 (process {victim} on " in capfd.readouterr().err
    assert not looking.goes_on


def test_one_that_is_stopped_is_named_and_ended_with_the_others(
    launcher: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    looking = Startup(launcher.pid, 3, 0.5)
    victim = look_below(launcher.pid).ranks[1].process
    os.kill(victim, signal.SIGSTOP)
    assert sorted(look_to_the_end(looking, launcher)) == [0, 1, 2]
    looking.finish(asked=False, code=9, listener=witness.Listener())
    said = capfd.readouterr().err
    assert f"rank 1 of 3 (process {victim} on " in said
    assert f"kill -CONT {victim}" in said
    assert said.count("rank") - said.count("ranks") == 2, said  # nobody else


def test_nothing_is_said_where_the_end_was_asked_for(
    launcher: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(startup, "GRACE", 0.1)
    looking = Startup(launcher.pid, 3, 600.0)
    looking.look()
    os.kill(look_below(launcher.pid).ranks[0].process, signal.SIGKILL)
    look_to_the_end(looking, launcher)
    looking.finish(asked=True, code=9, listener=witness.Listener())
    assert capfd.readouterr().err == ""


def test_once_the_witness_looks_on_nobody_looks_here(
    launcher: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    looking = Startup(launcher.pid, 3, 600.0)
    looking.look()
    assert looking.goes_on
    monkeypatch.setattr(startup, "look_below", lambda _: Seen({}, True))
    looking.look()
    assert not looking.goes_on


def test_a_witness_is_known_by_what_it_runs() -> None:
    call = [sys.executable, "-c", "input()", witness.__file__]
    program = f"import subprocess, sys; subprocess.run({call!r}, stdin=sys.stdin)"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as parent:
        seen = settle(lambda: look_below(parent.pid), lambda seen: seen.witness)
        parent.communicate(b"\n")
    assert seen.witness


def test_files_of_an_ended_launch_go_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "LEFT_BY_MPICH", ((str(tmp_path), "mpich_shm_*"),))
    monkeypatch.setattr(startup, "LAUNCHERS", ())
    left, held, old, other = (tmp_path / name for name in ("mpich_shm_1", "mpich_shm_2", "mpich_shm_3", "else"))
    for path in (left, held, old, other):
        path.write_bytes(bytes(mmap.PAGESIZE))
    os.utime(old, (0, 0))
    with held.open("r+b") as file, mmap.mmap(file.fileno(), mmap.PAGESIZE):
        remove_left(startup._started(os.getpid()))
        assert sorted(tmp_path.iterdir()) == sorted([held, old, other])


def test_a_file_that_another_launcher_may_have_made_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "LEFT_BY_MPICH", ((str(tmp_path), "mpich_shm_*"),))
    monkeypatch.setattr(startup, "LAUNCHERS", (Path("/proc/self/comm").read_text().strip(),))
    (tmp_path / "mpich_shm_1").write_bytes(b"")
    begun = startup._started(os.getpid())
    remove_left(begun - 1)
    assert (tmp_path / "mpich_shm_1").exists()
    monkeypatch.setattr(startup, "LAUNCHERS", ("no program's name",))
    remove_left(begun - 1)
    assert not (tmp_path / "mpich_shm_1").exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_stops_before_mpi_begins_ends_the_run(
    recipe: str, tmp_path: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "unisono", "train", recipe, "--ranks=3", f"--run={tmp_path / 'run'}"]
    with Watched(command, env={**os.environ, "UNISONO_TIMEOUT": "2"}) as run:
        run.until(lambda: len(look_below(run.process.pid).ranks) == 3)
        time.sleep(0.2)  # imports take seconds
        os.kill(look_below(run.process.pid).ranks[1].process, number)
        ended = run.finish()
    assert ended.returncode not in (0, None)
    assert re.search(r"^unisono: ranks? (\d, )*1(, \d)* of 3 \(process", ended.stderr, re.MULTILINE), ended.stderr
    assert not (tmp_path / "run" / "checkpoints").exists()
