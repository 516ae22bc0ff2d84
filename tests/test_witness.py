"""The witness names the rank that ended without a word, and nobody else."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import closing

import pytest

from unisono import witness


class Seats:
    """Three processes that stand for ranks, and a witness that looks on."""

    def __init__(self) -> None:
        self.processes = {
            rank: subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for rank in range(3)
        }
        self.line, self.mine = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.said: list[str] = []
        numbers = {rank: process.pid for rank, process in self.processes.items()}
        self.thread = threading.Thread(target=lambda: self.said.append(witness.look_on(self.line, 3, numbers)))
        self.thread.start()

    def end(self, rank: int, by: int = signal.SIGKILL) -> None:
        self.processes[rank].send_signal(by)
        self.processes[rank].wait()

    def close(self) -> str:
        self.thread.join(10)
        for process in self.processes.values():
            process.kill()
            process.communicate()
        self.line.close()
        self.mine.close()
        return self.said[0]


@pytest.fixture
def seats() -> Seats:
    if not hasattr(__import__("os"), "pidfd_open"):
        pytest.skip("this system has no pidfd")
    return Seats()


def test_the_first_that_says_nothing_is_named(seats: Seats) -> None:
    number = seats.processes[1].pid
    seats.end(1)
    assert seats.close().startswith(
        f"unisono: rank 1 of 3 (process {number} on {socket.gethostname()}) ended without a word"
    )


def test_one_that_has_ended_before_it_looks_on_is_named() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    line, mine = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with line, mine:
        numbers = {0: os.getpid(), 1: process.pid}
        assert witness.look_on(line, 2, numbers).startswith(f"unisono: rank 1 of 2 (process {process.pid} on ")
        mine.send(b"1")
        mine.send(b"all")
        assert not witness.look_on(line, 2, numbers)


def test_those_that_end_in_order_are_not(seats: Seats) -> None:
    for rank in (2, 0, 1):
        seats.mine.send(str(rank).encode())
        seats.end(rank)
    assert seats.close() == ""


def test_who_ends_all_has_said_why(seats: Seats) -> None:
    seats.mine.send(witness.ALL.encode())
    seats.end(0)
    assert seats.close() == ""


def test_last_words_are_said_and_the_witness_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """They reach the terminal even where somebody has redirected Python's stderr, as libraries do."""
    told, terminal = list[str](), io.StringIO()
    monkeypatch.setattr(witness, "tell", told.append)
    monkeypatch.setattr(witness, "HANDOVER", 0.0)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(sys, "__stderr__", terminal)
    witness.last_words("rank 1 of 4: gone\n")
    assert terminal.getvalue() == "rank 1 of 4: gone\n"
    assert told == [witness.ALL]


@pytest.mark.parametrize("garbage", [b"\xff\xfe", "ünïcode ∞".encode(), b"", b"x" * 5000, b"0" * 63 + b"\x80", b"all "])
def test_it_survives_whatever_is_sent_to_it(seats: Seats, garbage: bytes) -> None:
    seats.mine.send(garbage)
    seats.mine.send(b"2")
    seats.end(2)
    seats.end(0)
    assert "unisono: rank 0 of 3" in seats.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
@pytest.mark.parametrize("word", ["all", "1", "ÿ"])
def test_it_hears_nobody_but_its_own_user(word: str) -> None:
    ranks = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)]
    numbers = [process.pid for process in ranks]
    other = "import os, socket, sys; os.setuid(65534)\ns = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
    other += "s.sendto(sys.argv[2].encode('latin1'), chr(0) + sys.argv[1])"
    starts = f"import sys; from unisono import witness; print(witness.start((0, 1), {numbers}, 2), flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", starts], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout is not None
        assert starter.stderr is not None
        address = starter.stdout.readline().strip()
        subprocess.run([sys.executable, "-c", other, address, word], check=True)
        ranks[1].kill()
        told = starter.stderr.read()  # until the witness, which has it too, ends
    for process in ranks:
        process.kill()
        process.communicate()
    assert told.startswith("unisono: rank 1 of 2")


def test_the_command_that_has_started_the_launcher_is_told_where_it_listens() -> None:
    with closing(witness.Listener()) as listener:
        if not listener.address:
            pytest.skip("this system has no witness")
        process = subprocess.Popen([sys.executable, "-c", ""])
        process.wait()
        line = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        line.bind(f"\0unisono-test-{os.getpid()}")
        ready, is_ready = os.pipe()
        with line:
            done = subprocess.run(
                [sys.executable, witness.__file__, str(line.fileno()), str(is_ready), "2", f"1:{process.pid}"],
                env={**os.environ, witness.LISTENER: listener.address},
                pass_fds=[line.fileno(), is_ready],
                capture_output=True,
                text=True,
                check=True,
            )
        os.close(ready)
        os.close(is_ready)
        assert done.stderr == ""
        assert listener.words(5.0).startswith(f"unisono: rank 1 of 2 (process {process.pid} on ")
        assert listener.words(0.0) == ""
