"""Standby of a host: a process that has imported PyTorch and forks a rank for each request (`attach.py`).

    generation 1   attach ──▶ standby ── fork ──▶ rank 0, rank 1      imports: 2 to 10 s, once
    rank 1 dies
    generation 2   attach ──▶ standby ── fork ──▶ rank 0, rank 1      some milliseconds

A rank runs `python -m unisono ARGUMENTS` with the environment and the descriptors of the process that the launcher has
started. It ends with that process; one that stays stopped is killed, for others wait for it. MPI begins in the rank.

    request    | length | JSON |  and descriptors 0, 1, 2 and PMI's
    answer     process \n   exit code \n      negative for a signal

It listens to its own user alone, and ends when the command that trains has ended, on other hosts after IDLE_SECONDS
without a rank. The copies of the state in its host's memory end with it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import mpi4py

from unisono.elastic.attach import LENGTH, PMI_VARIABLE, peer_of
from unisono.launch import MEMORY_VARIABLE
from unisono.startup import STOPPED, stat_of

IDLE_SECONDS = 60.0
"""Seconds without a rank after which a standby ends."""

REQUEST_SECONDS = 10.0
"""Seconds in which a request arrives whole."""

POLL_SECONDS = 0.1

MAX_STOPPED_SECONDS = 0.5
"""Seconds after which a rank that is stopped (SIGSTOP) is killed."""

MAX_DESCRIPTORS = 4

GENERATION_VARIABLE, FOLDER_VARIABLE = "UNISONO_GENERATION", "UNISONO_FOLDER"
"""Environment variables with the number of a rank's generation, and the run's own folder."""

SET_DEATH_SIGNAL = 1
"""Request of Linux's `prctl`: the signal that a process gets when its parent dies."""

PRELOADED = (
    "torch",
    "torch._dynamo",
    "unisono.training.run",
    "unisono.elastic.survivors",
    "unisono.initialize",
    "unisono.models.convnet",
    "encodings.idna",
)
"""Modules that a rank needs."""


class Rank(NamedTuple):
    """A forked rank, and the process that the launcher knows."""

    process: int
    connection: socket.socket
    memory: str
    generation: int


class ForkRequest(NamedTuple):
    """Arguments, environment and descriptors of the process that a forked one takes the place of."""

    content: dict[str, Any]
    descriptors: list[int]


class Standby:
    """Ranks of one host that were forked, and what has happened to them."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._ranks: dict[int, Rank] = {}  # by the descriptor of its process
        self._stopped: dict[int, float] = {}  # since when, by process
        self._dismissed = False
        self.memory = ""
        """Folder of the run's copies in memory; empty if no rank has named one."""

    def serve(self) -> ForkRequest | None:
        """Fork ranks until none has been there for a while. Return None then; in each forked process, its request."""
        idle_since = time.monotonic()
        while self._ranks or not (self._dismissed or time.monotonic() - idle_since > IDLE_SECONDS):
            if self._ranks:
                idle_since = time.monotonic()
            connections = [rank.connection.fileno() for rank in self._ranks.values()]
            ready, _, _ = select.select([self._listener.fileno(), *self._ranks, *connections], [], [], POLL_SECONDS)
            if self._listener.fileno() in ready and (request := self._accept()) is not None:
                return request
            for descriptor, rank in list(self._ranks.items()):
                if descriptor in ready:
                    self._end(descriptor, rank)
                elif rank.connection.fileno() in ready:  # the launcher has killed the process that it knows
                    os.kill(rank.process, signal.SIGKILL)
            self._kill_stopped()
        return None

    def _accept(self) -> ForkRequest | None:
        """Fork a rank for the next connection. Return its request in the forked process, None in this one."""
        connection, _ = self._listener.accept()
        if peer_of(connection)[1] != os.getuid():
            connection.close()
            return None
        try:
            connection.settimeout(REQUEST_SECONDS)
            request = receive_request(connection)
            connection.settimeout(None)
        except (OSError, ValueError):  # it was killed meanwhile
            connection.close()
            return None
        environment = request.content.get("environment", {})
        memory, generation = environment.get(MEMORY_VARIABLE, self.memory), int(environment.get(GENERATION_VARIABLE, 0))
        if not request.descriptors:
            connection.close()
            self._dismissed = True
            return None
        for rank in self._ranks.values():  # nobody has told it of its end
            if rank.memory != memory or rank.generation < generation:  # its command was killed, or its host cut off
                os.kill(rank.process, signal.SIGKILL)
        if memory != self.memory:
            for left in Path(memory).parent.glob(f"{Path(memory).name.rpartition('-')[0]}-*"):  # of commands before it
                if left.name != Path(memory).name:
                    shutil.rmtree(left, ignore_errors=True)
        self.memory = memory
        process = os.fork()
        if process == 0:
            ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL)  # it must not outlive this process
            self._listener.close()
            connection.close()
            for descriptor, rank in self._ranks.items():  # the end of this process's connection must be seen
                os.close(descriptor)
                rank.connection.close()
            return request
        for descriptor in request.descriptors:
            os.close(descriptor)
        self._ranks[os.pidfd_open(process)] = Rank(process, connection, memory, generation)
        with suppress(OSError):
            connection.sendall(f"{process}\n".encode())
        return None

    def _end(self, descriptor: int, rank: Rank) -> None:
        """Say how a rank has ended."""
        _, status = os.waitpid(rank.process, 0)
        with suppress(OSError):  # nobody may ask any more
            rank.connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
        rank.connection.close()
        os.close(descriptor)
        del self._ranks[descriptor]
        self._stopped.pop(rank.process, None)

    def _kill_stopped(self) -> None:
        now = time.monotonic()
        for rank in self._ranks.values():
            if stat_of(rank.process)[0] not in STOPPED:
                self._stopped.pop(rank.process, None)
            elif now - self._stopped.setdefault(rank.process, now) > MAX_STOPPED_SECONDS:
                os.kill(rank.process, signal.SIGKILL)


def receive_request(connection: socket.socket) -> ForkRequest:
    """Return the request that arrives. Raises OSError or ValueError if it ends before."""
    header, descriptors, _, _ = socket.recv_fds(connection, LENGTH.size, MAX_DESCRIPTORS)
    content = b""
    left = LENGTH.unpack(header)[0] if len(header) == LENGTH.size else 0
    while left and (part := connection.recv(left)):
        content, left = content + part, left - len(part)
    return ForkRequest(json.loads(content), descriptors)


def become(request: ForkRequest) -> None:
    """Take over the environment, folder, cores and descriptors of the process that the launcher has started.

    NumPy's random numbers are seeded anew, as in a process that imports it.
    """
    content = request.content
    os.environ.clear()
    os.environ.update(content["environment"])
    for target, descriptor in enumerate(request.descriptors[:3]):
        os.dup2(descriptor, target)
        os.close(descriptor)
    for descriptor in request.descriptors[3:]:
        os.environ[PMI_VARIABLE] = str(descriptor)
    os.chdir(content["folder"])
    os.sched_setaffinity(0, content["cores"])
    sys.argv = ["unisono", *content["arguments"]]
    if (generator := sys.modules.get("numpy.random")) is not None:
        generator.seed()  # each rank would draw the same numbers, and its successor again


def main(name: str) -> None:
    """Listen as NAME, import what ranks need, and fork them; end at once if another process of this host has it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"\0{name}")
    except OSError:
        return
    listener.listen()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    mpi4py.rc(initialize=False, finalize=True)  # MPI begins in the ranks
    for module in PRELOADED:
        importlib.import_module(module)
    command = importlib.import_module("unisono.cli").command()
    command.make_context("unisono", ["train"])  # typer imports more once it reads words
    recipes = importlib.import_module("unisono.training.recipe")
    recipes.read_recipe(recipes.find_recipe(Path("digits")))  # what it needs once: the types of tables
    importlib.import_module("unisono.network.choice").read_table()
    importlib.import_module("unisono.reducer.made_on").sources()
    os.dup2(1, 2)  # errors so far went where the rank's go that has started it; the launcher waits for its end
    gc.freeze()  # so that a rank's garbage collection does not copy what it shares with others
    standby = Standby(listener)
    request = standby.serve()
    if request is not None:
        become(request)
        importlib.import_module("unisono.elastic.survivors").play()
    elif standby.memory:
        shutil.rmtree(standby.memory, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
