"""Report of a rank that dies without an error message: killed, out of memory, or crashed.

A launcher ends all ranks when one dies, and names a process at best. So each node has a small extra process, the
witness. Ranks that end in order notify it; it reports the first that does not. It ends with the last rank.

    rank 0 ── starts ──▶ witness ── watches the processes of ranks 0, 1, 2, 3
    rank 2    killed         └──▶ "unisono: rank 2 of 4 (process 4711 on node-a) ended unexpectedly ..."

It accepts messages from processes of its own user alone: the kernel identifies each sender.

That process runs this file as a script: it imports nothing of the project. Linux only; elsewhere it is not started.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

ABORT = "all"
"""Message of a rank that ends all ranks, and prints the reason itself."""

READY_TIMEOUT_SECONDS = 5.0
"""Longest wait of the ranks for the witness to be ready, which takes a twentieth of a second."""

FORWARDING_SECONDS = 0.25
"""Time for the launcher to forward a rank's last output: when a rank aborts, it drops output that it still holds."""

SEND_TIMEOUT_SECONDS = 1.0
"""Timeout of a message to the witness; a stopped or flooded witness delays no rank for longer."""

MAX_MESSAGES_PER_CHECK = 1000
"""Messages that the witness reads before it checks the processes again."""

CREDENTIALS = struct.Struct("3i")
"""Credentials of a sender from Linux: its process, user and group."""

WITNESS_VARIABLE = "UNISONO_WITNESS"
"""Environment variable with a rank's own process number and the address of its witness."""

LISTENER_VARIABLE = "UNISONO_LISTENER"
"""Environment variable with the address of the command that started the launcher."""

MAX_REPORT_BYTES = 4096
"""Largest report of a witness, in bytes."""


class Listener:
    """Receiver of the witness's report, in the command that started the launcher.

    A launcher that ends all ranks drops output that is still on its way to the terminal. So the witness sends its
    report to this command, which outlives the launcher: one message at its end, empty if no rank died unexpectedly.
    """

    def __init__(self) -> None:
        self.address = f"unisono-listener-{os.getpid()}-{os.urandom(4).hex()}" if hasattr(os, "pidfd_open") else ""
        if self.address:
            self._channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._channel.bind(f"\0{self.address}")

    def report(self, seconds: float) -> str:
        """Return the witness's report if it arrives within `seconds`, else an empty string."""
        until = time.monotonic() + seconds
        while self.address and select.select([self._channel], [], [], max(0.0, until - time.monotonic()))[0]:
            message = receive(self._channel)
            if message is not None:
                return message
        return ""

    def close(self) -> None:
        if self.address:
            self._channel.close()


def start(ranks: Sequence[int], processes: Sequence[int], size: int, wait: bool = True) -> str:
    """Start the witness for these ranks of this node, of `size` in all; return the address at which it listens.

    `processes` are those of the ranks, in their order. If not `wait`, of several that die before it is ready it may not
    know the first. Return an empty string where this system has no witness.
    """
    import subprocess  # noqa: PLC0415  the witness itself starts without it

    if not hasattr(os, "pidfd_open"):
        return ""
    address = f"unisono-witness-{os.getpid()}-{os.urandom(4).hex()}"
    pairs = [f"{rank}:{process}" for rank, process in zip(ranks, processes, strict=True)]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        channel.bind(f"\0{address}")
        ready, is_ready = os.pipe()
        command = [sys.executable, "-S", "-E", __file__, str(channel.fileno()), str(is_ready), str(size), *pairs]
        quiet, passed = subprocess.DEVNULL, [channel.fileno(), is_ready]  # nobody waits for its exit code: it has one
        subprocess.Popen(command, stdin=quiet, stdout=quiet, pass_fds=passed, start_new_session=True).returncode = 0
        os.close(is_ready)
        select.select([ready], [], [], READY_TIMEOUT_SECONDS if wait else 0.0)  # from here on every death is noticed
        os.close(ready)
    return address


def has_witness() -> bool:
    """Return True if this process has a witness. Its children have none, although they inherit the environment."""
    return os.environ.get(WITNESS_VARIABLE, "").split(":")[0] == str(os.getpid())


def set_address(address: str) -> None:
    """Store the address of this rank's witness."""
    os.environ[WITNESS_VARIABLE] = f"{os.getpid()}:{address}"


def notify(message: int | str) -> None:
    """Notify the witness, if there is one, that a rank ends in order, by its number, or that one ends ALL."""
    if has_witness():
        send(os.environ[WITNESS_VARIABLE].partition(":")[2], str(message))


def report_abort(report: str) -> None:
    """Print why this rank ends all ranks, and give the launcher time to forward it."""
    notify(ABORT)
    with suppress(OSError):
        sys.stdout.flush()
    with suppress(OSError):
        print_error(report)
    time.sleep(FORWARDING_SECONDS)


def print_error(text: str) -> None:
    """Write to the terminal, also where a library has redirected `sys.stderr`."""
    terminal = sys.__stderr__ or sys.stderr
    terminal.write(text)
    terminal.flush()


def watch(
    channel: socket.socket, size: int, processes: dict[int, int], on_ready: Callable[[], None] = lambda: None
) -> str:
    """Wait until all processes (by their ranks) have ended; return the report on the first that gave no notice.

    The report is empty if all did. `on_ready` is called when every end of a process will be noticed.

    A launcher ends the others at once, perhaps before this process runs again: epoll returns the descriptors in the
    order in which they became ready.
    """
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    watched, gone = dict[int, int](), list[int]()  # ranks by descriptors, and those whose processes have ended
    for rank, process in processes.items():
        try:
            watched[os.pidfd_open(process)] = rank
        except ProcessLookupError:
            gone.append(rank)
    poll = select.epoll()
    for descriptor in (channel.fileno(), *watched):
        poll.register(descriptor, select.EPOLLIN)
    on_ready()
    while watched or gone:
        ready = [descriptor for descriptor, _ in poll.poll(0 if gone else None)]
        for _ in range(MAX_MESSAGES_PER_CHECK):
            if not select.select([channel], [], [], 0)[0]:
                break
            message = receive(channel)
            if message == ABORT:
                return ""
            gone = [rank for rank in gone if str(rank) != message]
            for descriptor in [descriptor for descriptor, rank in watched.items() if str(rank) == message]:
                poll.unregister(descriptor)
                del watched[descriptor]
        died = [watched[descriptor] for descriptor in ready if descriptor in watched][:1]
        if gone or died:
            who = describe(gone or died, size, processes)
            return f"unisono: {who} ended unexpectedly: killed by a signal, out of memory, or os._exit"
    return ""


def receive(channel: socket.socket) -> str | None:
    """Return the next message if a process of this user has sent it, else None."""
    content, beside, _, _ = channel.recvmsg(MAX_REPORT_BYTES, socket.CMSG_SPACE(CREDENTIALS.size))
    for level, kind, data in beside:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            _, user, _ = CREDENTIALS.unpack(data[: CREDENTIALS.size])
            return content.decode(errors="replace") if user == os.getuid() else None
    return None


def describe(ranks: Sequence[int], size: int, processes: Mapping[int, int]) -> str:
    """Return a description of some of `size` ranks, with their processes and this host."""
    names, numbers = ", ".join(map(str, ranks)), ", ".join(str(processes[rank]) for rank in ranks)
    rank, process = ("ranks", "processes") if len(ranks) > 1 else ("rank", "process")
    return f"{rank} {names} of {size} ({process} {numbers} on {socket.gethostname()})"


def main(arguments: Sequence[str]) -> None:
    """Run the witness, given DESCRIPTOR DESCRIPTOR SIZE RANK:PROCESS ...; it closes the second when it is ready."""
    descriptor, is_ready, size, *pairs = arguments
    processes = {int(rank): int(process) for rank, process in (pair.split(":") for pair in pairs)}
    with socket.socket(fileno=int(descriptor)) as channel:
        report = watch(channel, int(size), processes, lambda: os.close(int(is_ready)))
    if not send(os.environ.get(LISTENER_VARIABLE, ""), report) and report:
        print(report, file=sys.stderr, flush=True)


def send(address: str, message: str) -> bool:
    """Send a message to an address; return False if it is empty, or nothing listens there any more."""
    if address:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.settimeout(SEND_TIMEOUT_SECONDS)
            channel.sendto(message.encode()[:MAX_REPORT_BYTES], f"\0{address}")
            return True
    return False


if __name__ == "__main__":
    main(sys.argv[1:])
