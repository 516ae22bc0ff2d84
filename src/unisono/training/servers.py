"""Servers of an asynchronous run: made on their ranks, and the end of a rank where others have died or are stopped."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from unisono import witness
from unisono.asynchronous.event_log import EventLog
from unisono.asynchronous.exchange import Centre, Coding
from unisono.asynchronous.link import MpiPort, survives_deaths
from unisono.asynchronous.messages import Request
from unisono.asynchronous.server import Server
from unisono.asynchronous.serving import Budget
from unisono.mpi import MPI
from unisono.rules.asynchronous import BaseAsynchronousRule
from unisono.training.cut import Beginning
from unisono.training.player import Run, Timer
from unisono.training.signals import STOPPED, SignalHandlers

Process = tuple[str, int]
"""Host and number of a rank's process."""


def make_server(
    run: Run,
    rule: BaseAsynchronousRule,
    beginning: Beginning,
    processes: Sequence[Process],
    request: Callable[[], Request],
) -> Server | None:
    """Return the server of this rank, if it has one. Its centre has the weights and buffers of the model.

    `request` returns the request of a signal to this process, once.
    """
    reducer, training, seats = run.trainer.reducer, run.recipe.training, rule.seats(run.world.size)
    number = run.world.rank - (seats.workers if rule.server == "rank" else 0)
    if not 0 <= number < seats.servers:
        return None
    links, layout = reducer.links, reducer.programs.layout()
    assert links is not None, "the reducer of an asynchronous rule has links"
    server_of = rule.server_of(layout)
    mine = {key: flat for key, flat in reducer.weights.flats().items() if server_of[key] == number}
    reducer.buffers.pack()
    codings = [  # of copies: made before the first exchange moves the centre
        Coding(rule.exchange.wire, False, {key: one.clone() for key, one in mine.items()}) for _ in range(seats.workers)
    ]
    buffers = reducer.buffers.flat.clone() if layout.buffers else None
    hosts = enumerate(processes[: seats.workers])
    here = {rank: process for rank, (host, process) in hosts if host == socket.gethostname()}
    return Server(
        rule,
        number,
        layout,
        Centre(mine, codings.__getitem__, buffers, reducer.buffers.move),
        MpiPort(links.comm, seats.workers, links.timeout, here),
        beginning.states[number],
        Budget(run.feed.samples, training.epochs, training.checkpoint_every * training.batch),
        rule.staleness or None,
        clock=lambda: run.elapsed,
        timeout=links.timeout,
        log=EventLog(run.home, number),
        recorded=None if beginning.recorded is None else beginning.recorded[number],
        due=Timer(60 * training.checkpoint_minutes).due,
        request=request,
        observe=(lambda _: None) if run.timeline is None else run.timeline.add,
        report=run.display.log,
    )


def serve(run: Run, server: Server, ask: Callable[[str], None]) -> int:
    """Serve on a rank that does nothing else. Return the exit code. `ask` is called for signals."""
    with SignalHandlers(ask, run.end_at_once, run.display.log):
        server.run()
    if not server.living:
        run.display.log(f"no worker is left: the run ends; resume with: unisono train --resume {run.home}")
        return 1
    return STOPPED if server.stopped else 0


def describe_seats(run: Run, rule: BaseAsynchronousRule) -> list[str]:
    """Return lines on workers and servers, and on what the death of a rank means here."""
    workers, servers = rule.seats(run.world.size)
    place = "rank of its own" if rule.server == "rank" else "thread beside a worker"
    lines = [f"{workers} workers, {servers} server{'s' * (servers > 1)}, each a {place}; nobody waits for others"]
    if survives_deaths():
        lines.append("a worker that dies does not end the others")
    elif run.world.size > 1:
        lines.append(
            f"{MPI.get_vendor()[0]} as started here ends all ranks when one dies; with Open MPI's "
            "mpirun --with-ft ulfm the others go on"
        )
    return lines


def leave(run: Run, server: Server | None, processes: Sequence[Process], code: int) -> int:
    """Return the exit code, or end this process where ranks have died and nothing can be done together."""
    gone = set[int]() if server is None else server.gone
    if survives_deaths():
        for host, process in (processes[worker] for worker in gone):
            if host == socket.gethostname():
                _kill(process)
        if run.timeline is not None:
            run.display.log("no timeline is written: under mpirun --with-ft ulfm each rank ends by itself")
        exit_at_once(run.world.rank, code)
    if gone:
        names = ", ".join(map(str, sorted(gone)))
        run.world.abort(code, f"unisono: the run is over; worker {names}, which has stopped, is ended with it\n")
    run.trainer.reducer.release()
    run.feed.close()
    return code


def _kill(process: int) -> None:
    """Kill a process of this host that may be stopped: the launcher would wait for it."""
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return


def exit_at_once(rank: int, code: int) -> NoReturn:
    """End this process without MPI_Finalize, which may wait for a rank that has died."""
    witness.notify(rank)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
