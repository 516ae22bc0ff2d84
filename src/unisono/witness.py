"""Says which rank died when one dies without a word: killed, out of memory, gone in a crash.

A launcher ends all ranks when one dies, and names a process at best. So on each node a small process of its own looks
on. Ranks that end in order tell it; of the first that does not it says which it was. It ends with the last rank.

    rank 0 ── starts ──▶ witness ── looks at the processes of ranks 0, 1, 2, 3
    rank 2    killed         └──▶ "unisono: rank 2 of 4 (process 4711 on node-a) ended without a word ..."

It listens to processes of its own user alone: the kernel says whose each word is.

This file is also what that process runs, by itself: it imports nothing of the project. Linux only; elsewhere nothing
is started.
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
"""What a rank says when it ends all of them, and says itself why."""

READY = 5.0
"""Seconds that the ranks wait at most for the witness to look on: it takes a twentieth of a second."""

HANDOVER = 0.25
"""Seconds for the launcher to pass on what a rank said last: when a rank aborts, it drops what it still holds."""

PROMPT = 1.0
"""Seconds in which a witness takes a word; one that is stopped, or flooded, holds up nobody for longer."""

WORDS = 1000
"""Words that it takes before it looks at the processes again."""

CREDENTIALS = struct.Struct("3i")
"""What Linux says of a sender: its process, user and group."""

VARIABLE = "UNISONO_WITNESS"
"""Where the environment of a rank has its own process number and the address of its witness."""

LISTENER = "UNISONO_LISTENER"
"""Where the environment has the address of the command that has started the launcher."""

LONGEST = 4096
"""Bytes of what a witness has to say, at most."""


class Listener:
    """What a witness says, for the command that has started the launcher.

    A launcher that ends all ranks drops what is still on its way to the terminal. So the witness tells this command,
    which outlives the launcher, one message at its end; it is empty where nobody died without a word.
    """

    def __init__(self) -> None:
        self.address = f"unisono-listener-{os.getpid()}-{os.urandom(4).hex()}" if hasattr(os, "pidfd_open") else ""
        if self.address:
            self._line = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._line.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._line.bind(f"\0{self.address}")

    def words(self, seconds: float) -> str:
        """Return what the witness says within so many seconds; empty for nothing."""
        until = time.monotonic() + seconds
        while self.address and select.select([self._line], [], [], max(0.0, until - time.monotonic()))[0]:
            word = hear(self._line)
            if word is not None:
                return word
        return ""

    def close(self) -> None:
        """Listen no more."""
        if self.address:
            self._line.close()


def start(ranks: Sequence[int], processes: Sequence[int], size: int) -> str:
    """Start the witness of this node's ranks, whose processes these are, of `size`; the address that it listens at.

    Empty where this system has none.
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
    """Whether this process has a witness. Its children have none, though they inherit the environment."""
    return os.environ.get(VARIABLE, "").split(":")[0] == str(os.getpid())


def know(address: str) -> None:
    """Remember where this rank's witness listens."""
    os.environ[VARIABLE] = f"{os.getpid()}:{address}"


def tell(word: int | str) -> None:
    """Tell the witness, where there is one, that a rank ends in order, by its number, or that one ends ALL."""
    if called() and (address := os.environ[VARIABLE].partition(":")[2]):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line, suppress(OSError):  # it may be dead itself
            line.settimeout(PROMPT)
            line.sendto(str(word).encode(), f"\0{address}")


def last_words(words: str) -> None:
    """Say on the terminal why this rank ends all of them now, and give the launcher the time to pass it on."""
    terminal = sys.__stderr__ or sys.stderr  # libraries redirect the other
    tell(ALL)
    sys.stdout.flush()
    terminal.write(words)
    terminal.flush()
    time.sleep(HANDOVER)


def look_on(line: socket.socket, size: int, processes: dict[int, int], looks: Callable[[], None] = lambda: None) -> str:
    """Wait until all processes (by their ranks) have ended; what there is to say of the first that said nothing.

    `looks` is called once none of them can end unseen.
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
    """Return the next message that a process of this user has sent; None for another's."""
    content, beside, _, _ = line.recvmsg(LONGEST, socket.CMSG_SPACE(CREDENTIALS.size))
    for level, kind, data in beside:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            _, user, _ = CREDENTIALS.unpack(data[: CREDENTIALS.size])
            return content.decode(errors="replace") if user == os.getuid() else None
    return None


def _open(processes: dict[int, int]) -> tuple[dict[int, int], list[int]]:
    """A descriptor for each process that is there still, with its rank; and the ranks whose processes are not."""
    watched, gone = {}, []
    for rank, process in processes.items():
        try:
            watched[os.pidfd_open(process)] = rank
        except ProcessLookupError:
            gone.append(rank)
    return watched, gone


def describe(ranks: Sequence[int], size: int, processes: Mapping[int, int]) -> str:
    """Return some of `size` ranks in words, with their processes and this host."""
    names = ", ".join(str(rank) for rank in ranks)
    numbers = ", ".join(str(processes[rank]) for rank in ranks)
    many = len(ranks) > 1
    return (
        f"rank{'s' if many else ''} {names} of {size} (process{'es' if many else ''} {numbers} on "
        f"{socket.gethostname()})"
    )


def main(arguments: Sequence[str]) -> None:
    """The witness's process: DESCRIPTOR DESCRIPTOR SIZE RANK:PROCESS ...; it closes the second when it looks on."""
    descriptor, is_ready, size, *pairs = arguments
    processes = {int(rank): int(process) for rank, process in (pair.split(":") for pair in pairs)}
    with socket.socket(fileno=int(descriptor)) as line:
        words = look_on(line, int(size), processes, lambda: os.close(int(is_ready)))
    if not _tell_listener(words) and words:
        print(words, file=sys.stderr, flush=True)


def _tell_listener(words: str) -> bool:
    """Tell the command that has started the launcher; False where there is none, or it has ended."""
    if address := os.environ.get(LISTENER):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line, suppress(OSError):
            line.settimeout(PROMPT)
            line.sendto(words.encode()[:LONGEST], f"\0{address}")
            return True
    return False


if __name__ == "__main__":
    main(sys.argv[1:])
