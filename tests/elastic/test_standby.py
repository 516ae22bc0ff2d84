"""Requests of a launcher's process to the process that has PyTorch, in one process."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from unisono.elastic import attach, standby


def test_a_request_has_all_that_makes_a_process_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_TEST", "ä = 1\nb")
    monkeypatch.setenv(attach.PMI_VARIABLE, str(sys.stdin.fileno() if sys.stdin.isatty() else 2))
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with here, there:
        attach.send_rank(here, ["train", "--set", "x=1"])
        found = standby.receive_request(there)
        for descriptor in found.descriptors:
            os.close(descriptor)
    assert len(found.descriptors) == 4
    assert found.content["arguments"] == ["train", "--set", "x=1"]
    assert found.content["environment"] == dict(os.environ)
    assert found.content["folder"] == str(Path.cwd())
    assert found.content["cores"] == sorted(os.sched_getaffinity(0))


def test_a_request_that_is_cut_off_is_refused() -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with here, there:
        here.sendall(attach.LENGTH.pack(100) + b'{"argu')
        here.close()
        with pytest.raises(ValueError, match=r"Unterminated|Expecting"):
            standby.receive_request(there)


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


def test_without_a_standby_none_is_dismissed() -> None:
    attach.dismiss(f"unisono-standby-of-nobody-{os.getpid()}")
