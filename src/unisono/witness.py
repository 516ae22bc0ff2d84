"""Says which rank died when one dies without a word: killed, out of memory, gone in a crash.

A launcher ends all ranks when one dies, and names a process at best. So on each node a small process of its own looks
on. Ranks that end in order tell it; of the first that does not it says which it was. It ends with the last rank.

    rank 0 ── starts ──▶ witness ── looks at the processes of ranks 0, 1, 2, 3
    rank 2    killed         └──▶ "unisono: rank 2 of 4 (process 4711 on node-a) ended without a word ..."

This file is also what that process runs, by itself: it imports nothing of the project. Linux only; elsewhere nothing
is started.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

ALL = "all"
"""What a rank says when it ends all of them, and says itself why."""

HANDOVER = 0.25
"""Seconds for the launcher to pass on what a rank said last: when a rank aborts, it drops what it still holds."""

VARIABLE = "UNISONO_WITNESS"
"""Where the environment of a rank has its own process number and the address of its witness."""


def start(ranks: Sequence[int], processes: Sequence[int], size: int) -> str:
    """Start the witness of this node's ranks, whose processes these are, of `size`; the address that it listens at.

    Empty where this system has none.
    """
    if not hasattr(os, "pidfd_open"):
        return ""
    address = f"unisono-witness-{os.getpid()}-{os.urandom(4).hex()}"
    pairs = [f"{rank}:{process}" for rank, process in zip(ranks, processes, strict=True)]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.bind(f"\0{address}")
        command = [sys.executable, "-S", "-E", __file__, str(line.fileno()), str(size), *pairs]
        quiet = subprocess.DEVNULL
        subprocess.Popen(command, stdin=quiet, stdout=quiet, pass_fds=[line.fileno()], start_new_session=True)
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
            line.sendto(str(word).encode(), f"\0{address}")


def last_words(words: str) -> None:
    """Say on the terminal why this rank ends all of them now, and give the launcher the time to pass it on."""
    terminal = sys.__stderr__ or sys.stderr  # libraries redirect the other
    tell(ALL)
    sys.stdout.flush()
    terminal.write(words)
    terminal.flush()
    time.sleep(HANDOVER)


def look_on(line: socket.socket, size: int, processes: dict[int, int]) -> str:
    """Wait until all processes (by their ranks) have ended; what there is to say of the first that said nothing."""
    watched = _open(processes)
    poll = select.poll()
    for descriptor in (line.fileno(), *watched):
        poll.register(descriptor, select.POLLIN)
    while watched:
        ready = {descriptor for descriptor, _ in poll.poll()}
        while select.select([line], [], [], 0)[0]:
            word = line.recv(64).decode()
            if word == ALL:
                return ""
            for descriptor in [place for place, rank in watched.items() if str(rank) == word]:
                poll.unregister(descriptor)
                del watched[descriptor]
        died = sorted(rank for place, rank in watched.items() if place in ready)
        if died:
            return _words(died, size, processes)
    return ""


def _open(processes: dict[int, int]) -> dict[int, int]:
    """A descriptor for each process that is there still, with its rank."""
    watched = {}
    for rank, process in processes.items():
        with suppress(ProcessLookupError):
            watched[os.pidfd_open(process)] = rank
    return watched


def _words(died: Sequence[int], size: int, processes: dict[int, int]) -> str:
    names = ", ".join(str(rank) for rank in died)
    numbers = ", ".join(str(processes[rank]) for rank in died)
    many = len(died) > 1
    return (
        f"unisono: rank{'s' if many else ''} {names} of {size} (process{'es' if many else ''} {numbers} on "
        f"{socket.gethostname()}) ended without a word: killed by a signal, out of memory, or by os._exit"
    )


def main(arguments: Sequence[str]) -> None:
    """The witness's process: DESCRIPTOR SIZE RANK:PROCESS ..."""
    descriptor, size, *pairs = arguments
    processes = {int(rank): int(process) for rank, process in (pair.split(":") for pair in pairs)}
    with socket.socket(fileno=int(descriptor)) as line:
        words = look_on(line, int(size), processes)
    if words:
        print(words, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
