"""One run at a time in a folder, and no lock of the dead."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from unisono.errors import UsageError
from unisono.training.run_directory import LOCK, RunLock

HOLD = """
import sys, time
from pathlib import Path
{prepare}
from unisono.training.run_directory import RunLock
lock = RunLock()
lock.take(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""
NO_FLOCK = """
import errno, fcntl
def flock(descriptor, operation): raise OSError(errno.ENOSYS, "Function not implemented")
fcntl.flock = flock
"""


@pytest.fixture(params=["flock", "no flock"])
def prepare(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a process has to run to be on such a file system; this one is there already."""
    if request.param == "flock":
        return ""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    return NO_FLOCK


@pytest.fixture
def holder(tmp_path: Path, prepare: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLD.format(prepare=prepare), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_run_is_reported_the_holder(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    message = rf"is in use by process {holder.pid} on {socket.gethostname()}, since 20\d\d-"
    with pytest.raises(UsageError, match=message):
        RunLock().take(tmp_path)


def test_what_a_killed_run_held_is_free(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / LOCK).exists(), "it had no time to remove it"
    lock = RunLock()
    lock.take(tmp_path)
    assert json.loads((tmp_path / LOCK).read_text())["process"] == os.getpid()
    lock.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("prepare")
def test_it_is_given_back_and_taken_again(tmp_path: Path) -> None:
    first, second = RunLock(), RunLock()
    for _ in range(3):
        first.take(tmp_path)
        with pytest.raises(UsageError, match=f"is in use by process {os.getpid()} on"):
            second.take(tmp_path)
        first.release()
        first.release()
        assert list(tmp_path.iterdir()) == []
        second.take(tmp_path)
        second.release()


@pytest.mark.usefixtures("prepare")
def test_a_number_that_another_process_has_now_is_no_holder(tmp_path: Path) -> None:
    """The process number of the dead is given to somebody else, as after a restart of the host."""
    of_the_dead = {"host": socket.gethostname(), "process": os.getppid(), "born": "1", "since": "2026-01-31"}
    gone = subprocess.Popen(["true"])
    gone.wait()
    unknown = {**of_the_dead, "process": gone.pid, "born": ""}
    for content in (json.dumps(of_the_dead), json.dumps(unknown), "", "torn {"):
        (tmp_path / LOCK).write_text(content)
        lock = RunLock()
        lock.take(tmp_path)
        assert json.loads((tmp_path / LOCK).read_text())["process"] == os.getpid()
        lock.release()


def test_another_host_without_locks_is_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    content = json.dumps({"host": "node-b", "process": 7, "born": "1", "since": "2026-01-31T12:00:00+01:00"})
    (tmp_path / LOCK).write_text(content)
    with pytest.raises(UsageError, match=r"process 7 on node-b, since 2026-01-31T12:00:00.*has ended, remove .*\.lock"):
        RunLock().take(tmp_path)
    assert (tmp_path / LOCK).read_text() == content


def test_a_folder_that_takes_no_lock(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot lock the run's folder: .*No such file or directory"):
        RunLock().take(tmp_path / "nowhere")
