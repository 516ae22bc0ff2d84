"""Beginning of an asynchronous run: new, resumed from a centre, or a replay of another run's events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from unisono.asynchronous.event_log import logged_servers, read_events, read_order, truncate_events
from unisono.asynchronous.serving import RunState, afresh, begin, resized, resumed_states
from unisono.errors import CheckpointError, UsageError
from unisono.rules.asynchronous import BaseAsynchronousRule
from unisono.step.rule import SeatCounts
from unisono.training import run_directory
from unisono.training.checkpoint import DamagedCheckpoint, checkpoint_names, load_newest, remove, step_of, tidy
from unisono.training.resume import rename_unused
from unisono.training.trainer import Trainer
from unisono.training.workers.snapshots import CentrePoint, WorkerSnapshot, discard_snapshots, load_centre, load_worker
from unisono.world import World


@dataclass(frozen=True)
class Beginning:
    """State in which a run begins, the same on all ranks."""

    states: tuple[RunState, ...]
    """State of each server."""
    notes: tuple[str, ...] = ()
    """Lines to report."""
    recorded: tuple[tuple[int, ...], ...] | None = None
    """Order of each server in the run that is replayed."""
    seconds: float = 0.0
    """Seconds that the run had taken before."""


def begin_new(seats: SeatCounts) -> Beginning:
    """Return the beginning of a new run."""
    return Beginning(_new_states(seats))


def _new_states(seats: SeatCounts) -> tuple[RunState, ...]:
    return (begin(seats.workers),) * seats.servers


def begin_replay(seats: SeatCounts, source: Path) -> Beginning:
    """Return the beginning of a replay of the run in `source`.

    Raises CheckpointError where it has no complete log, UsageError where it had another number of workers or servers.
    """
    logs = logged_servers(source)
    if len(logs) != seats.servers:
        raise UsageError(
            f"{source} has the events of {len(logs)} servers, and {seats.servers} are to serve: replay it on as many "
            "ranks, by the same rule"
        )
    point = load_centre(source)
    if point is None:
        raise CheckpointError(f"{source} has no checkpoint of a centre to compare with: it ended before its first one")
    if len(point.reply.workers) != seats.workers:
        raise UsageError(
            f"{source} was trained by {len(point.reply.workers)} workers, and {seats.workers} are to replay it: start "
            f"as many ranks as it had"
        )
    for server in range(seats.servers):
        for event in read_events(source, server):
            if "inexact" in event:
                raise CheckpointError(f"{source} cannot be replayed: {event['inexact']}")
    orders = tuple(tuple(read_order(source, server, point.numbers[server])) for server in range(seats.servers))
    return Beginning(_new_states(seats), (f"replays {sum(map(len, orders))} exchanges of {source}",), orders)


def begin_resumed(
    rule: BaseAsynchronousRule, world: World, trainer: Trainer, home: Path, data: str
) -> tuple[Beginning, WorkerSnapshot | None]:
    """Load the newest centre into the model. Return the beginning, and this worker's snapshot if it is there.

    Called by all ranks together. Raises CheckpointError for other data.
    """
    seats = rule.seats(world.size)
    point = world.call_on_root(lambda: load_centre(home, seats))
    if point is None:
        world.call_on_root(lambda: discard_newer(home, [], -1))
        return Beginning(_new_states(seats), (f"{home} has no checkpoint yet: the run begins again",)), None
    if point.data != data:
        raise CheckpointError(f"the run was trained on other data ({point.data}) than now ({data}): begin a new run")
    trainer.model.load_state_dict(point.weights)
    alike = len(point.reply.workers) == seats.workers and len(point.numbers) == seats.servers
    trains = world.rank < seats.workers
    mine = load_worker(home, world.rank, point.cut) if alike and trains else None
    lacking = [rank for rank, found in enumerate(world.all_gather_object(mine is not None or not trains)) if not found]
    inexact = _why_inexact(point, rule, seats, lacking)
    notes = world.call_on_root(lambda: discard_newer(home, point.numbers, point.cut, inexact, point.damaged))
    notes.append(f"resumes after {point.reply.number} exchanges, {point.cut} steps of all workers")
    if not alike:
        notes.append(
            f"the run had {len(point.reply.workers)} workers and {len(point.numbers)} servers: all workers begin at "
            "the centre, without state of the optimizer"
        )
    elif lacking:
        names = ", ".join(map(str, lacking))
        notes.append(f"worker {names} left no snapshot: it begins at the centre, without state of the optimizer")
    states = resumed_states(point.replies)
    if not alike:
        states = resized(states, seats.workers, seats.servers)
    elif lacking:
        states = tuple(afresh(one, lacking) for one in states)
    return Beginning(states, tuple(notes), seconds=point.reply.elapsed), mine


def _why_inexact(point: CentrePoint, rule: BaseAsynchronousRule, seats: SeatCounts, lacking: Sequence[int]) -> str:
    """Return why a replay from the start would not find the resumed run's weights; empty where it would."""
    if len(point.reply.workers) != seats.workers or len(point.numbers) != seats.servers:
        return "it was resumed with other numbers of workers or servers"
    if lacking:
        return f"it was resumed without the snapshots of workers {list(lacking)}"
    if rule.exchange.wire is not None:
        return "it was resumed with a wire, by which the stored centre is rounded"
    return "it was resumed with several servers, whose cuts differ" if seats.servers > 1 else ""


def discard_newer(
    home: Path, numbers: Sequence[int], cut: int, inexact: str = "", damaged: Sequence[DamagedCheckpoint] = ()
) -> list[str]:
    """Remove the centres, events, metrics and snapshots that are newer than the checkpoint `cut`, to resume from it; -1
    where the run begins again. Rename `damaged` centres. Return lines to log.

    `numbers` are those of the servers' exchanges at the cut; other servers have none. `inexact` says why a replay of
    the whole log would find other weights, if it would.
    """
    notes = rename_unused(home, damaged)
    folder = home / run_directory.CHECKPOINTS
    tidy(folder)
    newer = [name for name in checkpoint_names(folder) if step_of(name) > cut]
    for name in newer:
        remove(folder / name)
    if newer:
        names = ", ".join(newer)
        notes.append(f"not all workers had left a snapshot for {names}: removed, and an earlier checkpoint is used")
    run_directory.truncate_metrics(home, cut - 1)
    for server in logged_servers(home):
        truncate_events(home, server, numbers[server] if server < len(numbers) else 0, inexact)
    discard_snapshots(home, cut)
    return notes


def compare(home: Path, source: Path) -> str | None:
    """Return None where the final weights of two runs are equal bit for bit, else the first that differs."""
    mine, its = (load_newest(one / run_directory.CHECKPOINTS)[0].weights for one in (home, source))
    for name, value in its.items():
        if not (isinstance(value, torch.Tensor) and torch.equal(mine[name], value)):
            return name
    return None
