"""Requests of a launcher's process to the process that has PyTorch, in one process."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from unisono.elastic import attach, standby
from unisono.launch import MEMORY_VARIABLE


def test_a_request_has_all_that_makes_a_process_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_TEST", "ä = 1\nb")
    monkeypatch.setenv(attach.PMI_VARIABLE, str(sys.stdin.fileno() if sys.stdin.isatty() else 2))
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with here, there:
        attach.send_rank(here, ["train", "--set", "x=1"])
        request = standby.receive_request(there)
        for descriptor in request.descriptors:
            os.close(descriptor)
    assert len(request.descriptors) == 4
    assert request.content["arguments"] == ["train", "--set", "x=1"]
    assert request.content["environment"] == dict(os.environ)
    assert request.content["folder"] == str(Path.cwd())
    assert request.content["cores"] == sorted(os.sched_getaffinity(0))


def test_a_request_that_is_cut_off_is_refused() -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with here, there:
        here.sendall(attach.LENGTH.pack(100) + b'{"argu')
        here.close()
        with pytest.raises(ValueError, match=r"Unterminated|Expecting"):
            standby.receive_request(there)


@pytest.mark.parametrize(
    ("command", "generation", "ends"), [("mine", "2", False), ("mine", "3", True), ("next", "1", True)]
)
def test_ranks_that_nobody_has_told_of_their_end_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, generation: str, ends: bool
) -> None:
    """Those of an earlier generation, and of another command: what it has left in memory goes with them."""
    (tmp_path / "unisono-run-key-mine").mkdir()
    monkeypatch.setenv(MEMORY_VARIABLE, str(tmp_path / f"unisono-run-key-{command}"))
    monkeypatch.setenv(standby.GENERATION_VARIABLE, generation)
    name = f"\0unisono-standby-of-a-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as launched:
        listener.bind(name)
        listener.listen()
        launched.connect(name)
        attach.send_rank(launched, ["train"])
        serving = standby.Standby(listener)
        serving.memory = str(tmp_path / "unisono-run-key-mine")
        with subprocess.Popen(["sleep", "60"]) as process:
            descriptor = os.pidfd_open(process.pid)
            serving._ranks[descriptor] = standby.Rank(process.pid, launched, serving.memory, 2)
            if serving._accept() is not None:  # the forked rank
                os._exit(0)
            os.waitpid(int(attach.read_line(launched)), 0)
            ended = bool(select.select([descriptor], [], [], 10 if ends else 0.1)[0])
            process.kill()
    assert ended == ends
    assert (tmp_path / "unisono-run-key-mine").exists() == (command == "mine")


def test_a_standby_that_is_stopped_is_replaced() -> None:
    name = f"unisono-standby-of-a-test-{os.getpid()}"
    listen = (
        "import signal, socket; s = socket.socket(socket.AF_UNIX); s.bind(chr(0) + {!r}); s.listen(); signal.pause()"
    )
    command = [sys.executable, "-c", listen.format(name)]
    with attach.connect(name, command) as connection:
        stopped, *_ = attach.PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, attach.PEER.size))
    os.kill(stopped, signal.SIGSTOP)
    os.waitpid(stopped, os.WUNTRACED)
    with attach.connect(name, command) as connection:
        other, *_ = attach.PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, attach.PEER.size))
    assert other != stopped
    os.kill(other, signal.SIGSTOP)
    os.waitpid(other, os.WUNTRACED)
    attach.dismiss(name)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, pytest.raises(ConnectionRefusedError):
        connection.connect(f"\0{name}")


def test_a_signal_to_save_during_the_start_ends_nobody() -> None:
    """It comes while the standby imports PyTorch, which ignores it, too, and with it the ranks that it forks."""
    name = f"\0unisono-standby-of-a-test-{os.getpid()}"
    answer = f"""
import os, signal, socket
for process in os.getppid(), os.getpid():
    os.kill(process, signal.SIGUSR1)
listener = socket.socket(socket.AF_UNIX)
listener.bind({name!r})
listener.listen()
connection, _ = listener.accept()
connection.sendall(f"{{os.getpid()}}\\n7\\n".encode())
while connection.recv(1 << 16):
    pass
"""
    command = [sys.executable, "-S", "-E", attach.__file__, name[1:], "3", sys.executable, "-c", answer, "train"]
    assert subprocess.run(command, timeout=60, check=False).returncode == 7


def test_without_a_standby_none_is_dismissed() -> None:
    attach.dismiss(f"unisono-standby-of-nobody-{os.getpid()}")


def test_a_standby_of_another_user_is_told_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    name, user = f"unisono-standby-of-a-test-{os.getpid()}", os.getuid()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        monkeypatch.setattr(os, "getuid", lambda: user + 1)
        with pytest.raises(SystemExit) as ended:
            attach.connect(name, [])
        attach.dismiss(name)
        for _ in range(2):
            with listener.accept()[0] as heard:
                assert not heard.recv(1)
    assert ended.value.code == 2
    said = capfd.readouterr().err
    assert f"user {user} listens on {socket.gethostname()} as {name}" in said
    assert said.count("\n") == 1


def test_ranks_draw_numbers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of NumPy, whose generator was seeded before they were forked."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "argv", sys.argv)
    content = {"environment": {}, "folder": str(Path.cwd()), "cores": os.sched_getaffinity(0), "arguments": []}
    before, drawn = np.random.get_state(), list[int]()
    for _ in range(2):
        np.random.set_state(before)
        standby.become(standby.ForkRequest(content, []))
        drawn.append(np.random.randint(1 << 60))
    assert drawn[0] != drawn[1]
