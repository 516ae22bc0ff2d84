"""A rank that dies or is stopped during the start of the ranks is named, and the others end."""

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
from tests.progress import Watched, poll_until

from unisono import startup, witness
from unisono.startup import LaunchedProcesses, RankProcess, Startup, find_processes, rank_of, remove_leftover_files

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's /proc")

LAUNCHER = """
import os, subprocess, sys, time
for rank in range(3):
    environment = {**os.environ, "PMI_RANK": str(rank)}
    subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment)
input()
"""
"""Launcher that does not end its ranks when one dies."""


@pytest.fixture
def launcher() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", LAUNCHER], stdin=subprocess.PIPE, start_new_session=True)
    poll_until(lambda: find_processes(process.pid), lambda seen: len(seen.ranks) == 3)
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_ranks_are_recognised_by_their_environment() -> None:
    assert rank_of(b"HOME=/\0PMI_RANK=12\0") == 12
    assert rank_of(b"OMPI_COMM_WORLD_RANK=0") == 0
    assert rank_of(b"XPMI_RANK=3\0PMI_SIZE=4") is None
    assert rank_of(b"") is None


def test_ranks_below_a_launcher_are_found(launcher: subprocess.Popen[bytes]) -> None:
    seen = find_processes(launcher.pid)
    assert sorted(seen.ranks) == [0, 1, 2]
    assert not seen.witness
    assert not any(rank.stopped for rank in seen.ranks.values())
    os.kill(seen.ranks[1].process, signal.SIGSTOP)
    poll_until(lambda: find_processes(launcher.pid), lambda now: now.ranks[1].stopped)
    assert [now.stopped for _, now in sorted(find_processes(launcher.pid).ranks.items())] == [False, True, False]


def poll_to_the_end(supervision: Startup, launcher: subprocess.Popen[bytes]) -> dict[int, RankProcess]:
    """Poll until all ranks are gone. Return those of the first poll."""
    supervision.poll()
    first = dict(find_processes(launcher.pid).ranks)
    poll_until(lambda: supervision.poll() or alive(first), lambda left: not left)
    return first


def alive(ranks: dict[int, RankProcess]) -> list[int]:
    """Ranks that run; zombies do not count."""
    states = {
        rank: startup.read_process(rank_process.process, "stat").rpartition(b")")[2].split()
        for rank, rank_process in ranks.items()
    }
    return [rank for rank, state in states.items() if state and state[0] != b"Z"]


def test_a_single_rank_has_no_start_to_supervise() -> None:
    """It has no witness, which would end the start."""
    assert not Startup(os.getpid(), 1, 600.0).active


def test_the_first_rank_that_dies_is_named_and_the_others_end(
    launcher: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(startup, "GRACE_SECONDS", 0.3)
    supervision = Startup(launcher.pid, 3, 600.0)
    supervision.poll()
    victim = find_processes(launcher.pid).ranks[2].process
    os.kill(victim, signal.SIGKILL)
    assert sorted(poll_to_the_end(supervision, launcher)) == [0, 1]  # a zombie has no environment
    supervision.finish(stop_requested=False, code=9, listener=witness.Listener())
    assert f"rank 2 of 3 (process {victim} on " in capfd.readouterr().err
    assert not supervision.active


def test_the_first_of_two_ranks_found_dead_at_once_is_named(
    launcher: subprocess.Popen[bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    """As where the launcher has ended the others before this process ran again."""
    supervision = Startup(launcher.pid, 3, 600.0)
    supervision.poll()
    ranks = find_processes(launcher.pid).ranks
    for rank in (2, 0):
        os.kill(ranks[rank].process, signal.SIGKILL)
        poll_until(lambda rank=rank: alive({rank: ranks[rank]}), lambda left: not left)  # type: ignore[misc]
    supervision.poll()
    os.kill(launcher.pid, signal.SIGKILL)
    supervision.finish(stop_requested=False, code=9, listener=witness.Listener())
    assert f"unisono: rank 2 of 3 (process {ranks[2].process} on " in capfd.readouterr().err


def test_a_stopped_rank_is_named_and_all_ranks_end(
    launcher: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    supervision = Startup(launcher.pid, 3, 0.5)
    victim = find_processes(launcher.pid).ranks[1].process
    os.kill(victim, signal.SIGSTOP)
    assert sorted(poll_to_the_end(supervision, launcher)) == [0, 1, 2]
    supervision.finish(stop_requested=False, code=9, listener=witness.Listener())
    report = capfd.readouterr().err
    assert f"rank 1 of 3 (process {victim} on " in report
    assert f"kill -CONT {victim}" in report
    assert report.count("rank") - report.count("ranks") == 2, report  # nobody else


def test_no_rank_is_reported_after_a_requested_stop(
    launcher: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(startup, "GRACE_SECONDS", 0.1)
    supervision = Startup(launcher.pid, 3, 600.0)
    supervision.poll()
    os.kill(find_processes(launcher.pid).ranks[0].process, signal.SIGKILL)
    poll_to_the_end(supervision, launcher)
    supervision.finish(stop_requested=True, code=9, listener=witness.Listener())
    assert capfd.readouterr().err == "unisono: stopped by a signal during the start of the ranks\n"


def test_supervision_ends_when_the_witness_is_ready(
    launcher: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    supervision = Startup(launcher.pid, 3, 600.0)
    supervision.poll()
    assert supervision.active
    monkeypatch.setattr(startup, "find_processes", lambda _: LaunchedProcesses({}, True))
    supervision.poll()
    assert not supervision.active


def test_a_witness_is_recognised_by_its_command() -> None:
    call = [sys.executable, "-c", "input()", witness.__file__]
    program = f"import subprocess, sys; subprocess.run({call!r}, stdin=sys.stdin)"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as parent:
        seen = poll_until(lambda: find_processes(parent.pid), lambda seen: seen.witness)
        parent.communicate(b"\n")
    assert seen.witness


def test_only_files_of_the_ended_launch_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "MPICH_FILES", ((str(tmp_path), "mpich_shm_*"),))
    monkeypatch.setattr(startup, "LAUNCHERS", ())
    left, held, old, other = (tmp_path / name for name in ("mpich_shm_1", "mpich_shm_2", "mpich_shm_3", "else"))
    for path in (left, held, old, other):
        path.write_bytes(bytes(mmap.PAGESIZE))
    os.utime(old, (0, 0))
    with held.open("r+b") as file, mmap.mmap(file.fileno(), mmap.PAGESIZE):
        remove_leftover_files(startup.started_at(os.getpid()))
        assert sorted(tmp_path.iterdir()) == sorted([held, old, other])


def test_a_file_that_another_launcher_may_have_made_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "MPICH_FILES", ((str(tmp_path), "mpich_shm_*"),))
    monkeypatch.setattr(startup, "LAUNCHERS", (Path("/proc/self/comm").read_text().strip(),))
    (tmp_path / "mpich_shm_1").write_bytes(b"")
    begun = startup.started_at(os.getpid())
    remove_leftover_files(begun - 1)
    assert (tmp_path / "mpich_shm_1").exists()
    monkeypatch.setattr(startup, "LAUNCHERS", ("no program's name",))
    remove_leftover_files(begun - 1)
    assert not (tmp_path / "mpich_shm_1").exists()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_stops_before_mpi_begins_ends_the_run(
    recipe: str, tmp_path: Path, signum: signal.Signals
) -> None:
    command = [sys.executable, "-m", "unisono", "train", recipe, "--ranks=3", f"--run={tmp_path / 'run'}"]
    with Watched(command, env={**os.environ, "UNISONO_TIMEOUT": "2"}) as run:
        run.until(lambda: len(find_processes(run.process.pid).ranks) == 3)
        time.sleep(0.2)  # imports take seconds
        os.kill(find_processes(run.process.pid).ranks[1].process, signum)
        ended = run.finish()
    assert ended.returncode not in (0, None)
    assert re.search(r"^unisono: ranks? (\d, )*1(, \d)* of 3 \(process", ended.stderr, re.MULTILINE), ended.stderr
    assert not (tmp_path / "run" / "checkpoints").exists()
