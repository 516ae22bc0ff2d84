"""Report of a rank that dies without an error message: killed, out of memory, or crashed.

A launcher ends all ranks when one dies, and names a process at best. So each node has a small extra process, the
witness. Ranks that end in order notify it; it names the first that does not. It ends with the last rank.

    rank 0 ── starts ──▶ witness ── looks at the processes of ranks 0, 1, 2, 3
    rank 2    killed         └──▶ "unisono: rank 2 of 4 (process 4711 on node-a) ended without a word ..."

It accepts messages from processes of its own user alone: the kernel identifies each sender.

That process runs this file by itself: it imports nothing of the project. Linux only; elsewhere nothing is started.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

ALL = "all"
"""Message of a rank that ends all ranks, and prints the reason itself."""

READY = 5.0
"""Most seconds that the ranks wait for the witness to be ready: it takes a twentieth of a second."""

HANDOVER = 0.25
"""Seconds for the launcher to pass on a rank's last output: when a rank aborts, it drops what it still holds."""

PROMPT = 1.0
"""Seconds in which a witness accepts a message; one that is stopped, or flooded, delays nobody for longer."""

WORDS = 1000
"""Messages that the witness reads before it checks the processes again."""

CREDENTIALS = struct.Struct("3i")
"""Credentials of a sender from Linux: its process, user and group."""

VARIABLE = "UNISONO_WITNESS"
"""Environment variable with a rank's own process number and the address of its witness."""

LISTENER = "UNISONO_LISTENER"
"""Environment variable with the address of the command that started the launcher."""

LONGEST = 4096
"""Most bytes of a witness's report."""


class Listener:
    """Receiver of the witness's report, in the command that started the launcher.

    A launcher that ends all ranks drops output that is still on its way to the terminal. So the witness sends its
    report to this command, which outlives the launcher: one message at its end, empty where nobody died without a
    message.
    """

    def __init__(self) -> None:
        self.address = f"unisono-listener-{os.getpid()}-{os.urandom(4).hex()}" if hasattr(os, "pidfd_open") else ""
        if self.address:
            self._line = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._line.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._line.bind(f"\0{self.address}")

    def words(self, seconds: float) -> str:
        """Return the witness's report if it comes within so many seconds, else an empty string."""
        until = time.monotonic() + seconds
        while self.address and select.select([self._line], [], [], max(0.0, until - time.monotonic()))[0]:
            word = hear(self._line)
            if word is not None:
                return word
        return ""

    def close(self) -> None:
        """Stop listening."""
        if self.address:
            self._line.close()


def start(ranks: Sequence[int], processes: Sequence[int], size: int) -> str:
    """Start the witness for these ranks of this node, of `size` in all; return the address at which it listens.

    `processes` are those of the ranks, in their order. Return an empty string where this system has no witness.
    """
    if not hasattr(os, "pidfd_open"):
        return ""
    address = f"unisono-witness-{os.getpid()}-{os.urandom(4).hex()}"
    pairs = [f"{rank}:{process}" for rank, process in zip(ranks, processes, strict=True)]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        line.bind(f"\0{address}")
        ready, is_ready = os.pipe()
        command = [sys.executable, "-S", "-E", __file__, str(line.fileno()), str(is_ready), str(size), *pairs]
        quiet, passed = subprocess.DEVNULL, [line.fileno(), is_ready]
        subprocess.Popen(command, stdin=quiet, stdout=quiet, pass_fds=passed, start_new_session=True)
        os.close(is_ready)
        select.select([ready], [], [], READY)  # from here on nobody dies unseen
        os.close(ready)
    return address


def called() -> bool:
    """Return True if this process has a witness. Its children have none, though they inherit the environment."""
    return os.environ.get(VARIABLE, "").split(":")[0] == str(os.getpid())


def know(address: str) -> None:
    """Store the address of this rank's witness."""
    os.environ[VARIABLE] = f"{os.getpid()}:{address}"


def tell(word: int | str) -> None:
    """Notify the witness, if there is one, that a rank ends in order, by its number, or that one ends ALL."""
    if called() and (address := os.environ[VARIABLE].partition(":")[2]):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line, suppress(OSError):  # it may be dead itself
            line.settimeout(PROMPT)
            line.sendto(str(word).encode(), f"\0{address}")


def last_words(words: str) -> None:
    """Print why this rank ends all ranks now, and give the launcher the time to pass it on."""
    terminal = sys.__stderr__ or sys.stderr  # libraries redirect the other
    tell(ALL)
    sys.stdout.flush()
    terminal.write(words)
    terminal.flush()
    time.sleep(HANDOVER)


def look_on(line: socket.socket, size: int, processes: dict[int, int], looks: Callable[[], None] = lambda: None) -> str:
    """Wait until all processes (by their ranks) have ended; return the report on the first that gave no notice.

    The report is empty if all did. `looks` is called once none of them can end unseen.
    """
    line.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    watched, gone = _open(processes)
    looks()
    poll = select.poll()
    for descriptor in (line.fileno(), *watched):
        poll.register(descriptor, select.POLLIN)
    while watched or gone:
        ready = {descriptor for descriptor, _ in poll.poll(0 if gone else None)}
        for _ in range(WORDS):
            if not select.select([line], [], [], 0)[0]:
                break
            word = hear(line)
            if word == ALL:
                return ""
            gone = [rank for rank in gone if str(rank) != word]
            for descriptor in [place for place, rank in watched.items() if str(rank) == word]:
                poll.unregister(descriptor)
                del watched[descriptor]
        died = sorted([*gone, *(rank for place, rank in watched.items() if place in ready)])
        if died:
            who = describe(died, size, processes)
            return f"unisono: {who} ended without a word: killed by a signal, out of memory, or by os._exit"
    return ""


def hear(line: socket.socket) -> str | None:
    """Return the next message if a process of this user has sent it; None for another's."""
    content, beside, _, _ = line.recvmsg(LONGEST, socket.CMSG_SPACE(CREDENTIALS.size))
    for level, kind, data in beside:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            _, user, _ = CREDENTIALS.unpack(data[: CREDENTIALS.size])
            return content.decode(errors="replace") if user == os.getuid() else None
    return None


def _open(processes: dict[int, int]) -> tuple[dict[int, int], list[int]]:
    """Return a descriptor for each process that still exists, with its rank; and the ranks whose processes do not."""
    watched, gone = {}, []
    for rank, process in processes.items():
        try:
            watched[os.pidfd_open(process)] = rank
        except ProcessLookupError:
            gone.append(rank)
    return watched, gone


def describe(ranks: Sequence[int], size: int, processes: Mapping[int, int]) -> str:
    """Return a description of some of `size` ranks, with their processes and this host."""
    names = ", ".join(str(rank) for rank in ranks)
    numbers = ", ".join(str(processes[rank]) for rank in ranks)
    many = len(ranks) > 1
    return (
        f"rank{'s' if many else ''} {names} of {size} (process{'es' if many else ''} {numbers} on "
        f"{socket.gethostname()})"
    )


def main(arguments: Sequence[str]) -> None:
    """Run the witness, given DESCRIPTOR DESCRIPTOR SIZE RANK:PROCESS ...; it closes the second when it is ready."""
    descriptor, is_ready, size, *pairs = arguments
    processes = {int(rank): int(process) for rank, process in (pair.split(":") for pair in pairs)}
    with socket.socket(fileno=int(descriptor)) as line:
        words = look_on(line, int(size), processes, lambda: os.close(int(is_ready)))
    if not _tell_listener(words) and words:
        print(words, file=sys.stderr, flush=True)


def _tell_listener(words: str) -> bool:
    """Send the report to the command that started the launcher; return False if there is none, or it has ended."""
    if address := os.environ.get(LISTENER):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line, suppress(OSError):
            line.settimeout(PROMPT)
            line.sendto(words.encode()[:LONGEST], f"\0{address}")
            return True
    return False


if __name__ == "__main__":
    main(sys.argv[1:])
