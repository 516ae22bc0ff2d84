"""The witness reports the rank that ended unexpectedly, and no other."""

from __future__ import annotations

import errno
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


class WatchedRanks:
    """Three processes in place of ranks, and a witness."""

    def __init__(self) -> None:
        self.processes = {
            rank: subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for rank in range(3)
        }
        self.channel, self.sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.reports: list[str] = []
        numbers = {rank: process.pid for rank, process in self.processes.items()}
        self.thread = threading.Thread(target=lambda: self.reports.append(witness.watch(self.channel, 3, numbers)))
        self.thread.start()

    def end(self, rank: int, by: int = signal.SIGKILL) -> None:
        self.processes[rank].send_signal(by)
        self.processes[rank].wait()

    def close(self) -> str:
        self.thread.join(10)
        for process in self.processes.values():
            process.kill()
            process.communicate()
        self.channel.close()
        self.sender.close()
        return self.reports[0]


@pytest.fixture
def ranks() -> WatchedRanks:
    if not hasattr(__import__("os"), "pidfd_open"):
        pytest.skip("this system has no pidfd")
    return WatchedRanks()


def test_the_first_rank_without_notice_is_reported(ranks: WatchedRanks) -> None:
    pid = ranks.processes[1].pid
    ranks.end(1)
    assert ranks.close().startswith(
        f"unisono: rank 1 of 3 (process {pid} on {socket.gethostname()}) ended unexpectedly"
    )


def test_a_rank_that_ended_before_the_witness_began_is_reported() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    channel, sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with channel, sender:
        numbers = {0: os.getpid(), 1: process.pid}
        assert witness.watch(channel, 2, numbers).startswith(f"unisono: rank 1 of 2 (process {process.pid} on ")
        sender.send(b"1")
        sender.send(b"all")
        assert not witness.watch(channel, 2, numbers)


def test_the_first_of_two_ranks_found_dead_at_once_is_reported() -> None:
    """As where the launcher has ended the others before the witness ran again."""
    processes = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(3)]

    def end() -> None:
        for rank in (2, 0):
            processes[rank].communicate()

    channel, _sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with channel, _sender:
        report = witness.watch(channel, 3, {rank: process.pid for rank, process in enumerate(processes)}, end)
    processes[1].communicate()
    assert report.startswith(f"unisono: rank 2 of 3 (process {processes[2].pid} on ")


def test_ranks_that_end_in_order_are_not_reported(ranks: WatchedRanks) -> None:
    for rank in (2, 0, 1):
        ranks.sender.send(str(rank).encode())
        ranks.end(rank)
    assert ranks.close() == ""


def test_no_report_after_an_abort(ranks: WatchedRanks) -> None:
    ranks.sender.send(witness.ABORT.encode())
    ranks.end(0)
    assert ranks.close() == ""


def test_an_abort_is_printed_and_the_witness_notified(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message reaches the terminal even if a library has redirected sys.stderr."""
    sent, terminal = list[str](), io.StringIO()
    monkeypatch.setattr(witness, "notify", sent.append)
    monkeypatch.setattr(witness, "FORWARDING_SECONDS", 0.0)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(sys, "__stderr__", terminal)
    witness.report_abort("rank 1 of 4: gone\n")
    assert terminal.getvalue() == "rank 1 of 4: gone\n"
    assert sent == [witness.ABORT]


def test_a_rank_without_free_files_or_a_terminal_aborts_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(witness, "has_witness", lambda: True)
    monkeypatch.setattr(witness, "FORWARDING_SECONDS", 0.0)
    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(sys, "__stderr__", Full())
    monkeypatch.setenv(witness.WITNESS_VARIABLE, "1:nobody")
    witness.report_abort("rank 1 of 4: gone\n")


@pytest.mark.parametrize("garbage", [b"\xff\xfe", "ünïcode ∞".encode(), b"", b"x" * 5000, b"0" * 63 + b"\x80", b"all "])
def test_it_ignores_malformed_messages(ranks: WatchedRanks, garbage: bytes) -> None:
    ranks.sender.send(garbage)
    ranks.sender.send(b"2")
    ranks.end(2)
    ranks.end(0)
    assert "unisono: rank 0 of 3" in ranks.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
@pytest.mark.parametrize("word", ["all", "1", "ÿ"])
def test_it_accepts_messages_of_its_own_user_only(word: str) -> None:
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
        report = starter.stderr.read()  # until the witness ends, which has inherited it
    for process in ranks:
        process.kill()
        process.communicate()
    assert report.startswith("unisono: rank 1 of 2")


def test_the_report_goes_to_the_listener() -> None:
    with closing(witness.Listener()) as listener:
        if not listener.address:
            pytest.skip("this system has no witness")
        process = subprocess.Popen([sys.executable, "-c", ""])
        process.wait()
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        channel.bind(f"\0unisono-test-{os.getpid()}")
        ready, is_ready = os.pipe()
        with channel:
            done = subprocess.run(
                [sys.executable, witness.__file__, str(channel.fileno()), str(is_ready), "2", f"1:{process.pid}"],
                env={**os.environ, witness.LISTENER_VARIABLE: listener.address},
                pass_fds=[channel.fileno(), is_ready],
                capture_output=True,
                text=True,
                check=True,
            )
        os.close(ready)
        os.close(is_ready)
        assert done.stderr == ""
        assert listener.report(5.0).startswith(f"unisono: rank 1 of 2 (process {process.pid} on ")
        assert listener.report(0.0) == ""


def test_its_start_warns_of_nothing() -> None:
    start = "witness.set_address(witness.start([0], [os.getpid()], 1)); witness.notify(0)"
    command = [sys.executable, "-W", "error", "-c", f"import os; from unisono import witness; {start}"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stderr == ""
