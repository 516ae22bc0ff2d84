"""Attachment of a rank that a launcher has started to a process that has PyTorch already (`standby.py`).

    mpiexec ── starts ──▶ attach ── arguments, environment, stdin, stdout, stderr, PMI ──▶ standby ── forks ──▶ rank
                            ▲ signals ─────────────────────────────────────────────────────────────────────▶ │
                            └ exit code ◀─────────────────────────────────────────────────────────────────────┘

The launcher knows this process alone: it forwards signals to the rank, and ends as the rank ends. If it is killed, the
standby kills the rank. Runs as a script, and imports nothing of the project: it starts in some 20 ms. Linux only.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

START_SECONDS = 120.0
"""Seconds in which a standby of this host accepts a rank: it imports PyTorch first."""

RETRY_SECONDS = 0.02

LENGTH = struct.Struct("!I")
"""Length of a request, which is JSON; the descriptors go with it."""

PEER = struct.Struct("3i")
"""Process, user and group of the other end of a connection."""

BAD_INPUT = 2
"""Exit code for input that another generation would refuse, too, unless it has other ranks."""

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

PMI_VARIABLE = "PMI_FD"
"""Variable with the descriptor by which a rank speaks to the launchers of the MPICH family."""


def connect(name: str, command: list[str]) -> socket.socket:
    """Return a connection to this host's standby; start it if there is none. Nothing is sent to another user's."""
    until, started = time.monotonic() + START_SECONDS, False
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(f"\0{name}")
        except ConnectionRefusedError:
            connection.close()
            if time.monotonic() > until:
                sys.exit(
                    f"unisono: no process with PyTorch answers on {socket.gethostname()} within {START_SECONDS:g} s"
                )
            if not started:  # others of this host may start one, too: one of them gets the name
                import subprocess  # noqa: PLC0415  its import takes as long as the start of the interpreter

                started, quiet = True, subprocess.DEVNULL
                subprocess.Popen(command, stdin=quiet, stdout=quiet, start_new_session=True)
            time.sleep(RETRY_SECONDS)
        else:
            process, user = peer_of(connection)
            if user != os.getuid():
                connection.close()
                where = f"user {user} listens on {socket.gethostname()} as {name}, the name of this run's own process"
                print(f"unisono: {where}: end process {process}, or name another folder for the run", file=sys.stderr)
                sys.exit(BAD_INPUT)
            if not _kill_stopped(process):
                return connection
            connection.close()


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the process and the user that listen at the other end."""
    process, user, _ = PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))
    return process, user


def _kill_stopped(process: int) -> bool:
    """Kill the standby if it is stopped (SIGSTOP), as it would not answer. Return True if it was."""
    with suppress(OSError):  # it has just ended
        with open(f"/proc/{process}/stat", "rb") as file:  # noqa: PTH123  pathlib takes as long as the rest to import
            state = file.read().rpartition(b")")[2].split()[0]
        if state in (b"T", b"t"):
            descriptor = os.pidfd_open(process)
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            select.select([descriptor], [], [])  # until it has ended: another gets the name then
            os.close(descriptor)
            return True
    return False


def send_rank(connection: socket.socket, arguments: list[str]) -> None:
    """Send what makes a process this rank."""
    descriptors = [0, 1, 2]
    if PMI_VARIABLE in os.environ:
        descriptors.append(int(os.environ[PMI_VARIABLE]))
    request = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),  # noqa: PTH109  as above
        "cores": sorted(os.sched_getaffinity(0)),
    }
    send(connection, request, descriptors)


def send(connection: socket.socket, request: Mapping[str, object], descriptors: list[int]) -> None:
    """Send a request, with descriptors of this process."""
    content = json.dumps(request).encode()
    socket.send_fds(connection, [LENGTH.pack(len(content))], descriptors)
    connection.sendall(content)


def dismiss(name: str) -> None:
    """End this host's standby, if there is one, once its ranks have ended."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, suppress(ConnectionRefusedError):
        connection.connect(f"\0{name}")
        process, user = peer_of(connection)
        if user == os.getuid() and not _kill_stopped(process):
            send(connection, {}, [])


def read_line(connection: socket.socket) -> bytes:
    """Return the next line, without its end; empty at the end of the connection."""
    line = b""
    with suppress(ConnectionResetError):
        while (byte := connection.recv(1)) not in (b"", b"\n"):
            line += byte
    return line


def main(name: str, count: str, *words: str) -> None:
    """Become the launcher's view of a rank: NAME, COUNT, COUNT words of the standby's command, then its arguments."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # nothing is to be saved yet: the standby and its ranks inherit it
    command, arguments = list(words[: int(count)]), list(words[int(count) :])
    connection = connect(name, command)
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # until there is a process to forward them to
    send_rank(connection, arguments)
    process = int(read_line(connection) or 0)
    if not process:
        sys.exit(f"unisono: the process that imports PyTorch on {socket.gethostname()} has ended: {' '.join(command)}")

    def forward(signum: int, _frame: object) -> None:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(process, signum)

    for signum in FORWARDED:
        signal.signal(signum, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    status = int(read_line(connection) or -signal.SIGKILL)
    if status < 0:  # as the rank has ended: the launcher says which signal it was
        signal.signal(-status, signal.SIG_DFL) if -status not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
