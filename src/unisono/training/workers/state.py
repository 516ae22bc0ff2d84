"""State of an asynchronous run: the centre, and the state of each worker when it next sends its weights.

    server      ... 17  18 │ 19  20  21 ...      a cut before exchange 19: all that came before it is in the centre
    worker 0        17     │     20  saved as it was when it sent 20
    worker 1            18 │ 19      saved as it was when it sent 19; stores the centre that came back

    RUN/checkpoints/step-000000412/           the centre
    RUN/workers/worker-0/step-000000412/      weights, optimizer and progress of worker 0

A worker's state at its next exchange depends on earlier replies alone, so the files together are a state of the run
in which no message is under way: a consistent cut (Chandy and Lamport 1985). A run that resumes there serves the same
exchanges again, in whatever order they come.

It resumes from the newest cut that all who trained have left a snapshot for:

    centres        412      450      455            kept: the newest three
    worker 0       412      450      455
    worker 1       412                              it had not come since 412 when the run was killed

450 and 455 would let worker 1 begin at the centre, without state of its optimizer; so 412 is chosen. Where no kept
centre has all snapshots, since a worker was stopped for long, it is the newest. Of each worker the newest three
snapshots are kept, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from unisono.asynchronous.event_log import logged_servers, read_events, read_order, truncate_events
from unisono.asynchronous.messages import Order, Reply, decode_reply
from unisono.asynchronous.serving import RunState, afresh, begin, resized, resumed_states
from unisono.errors import CheckpointError, UsageError
from unisono.rules.asynchronous import BaseAsynchronousRule
from unisono.step.rule import SeatCounts
from unisono.training import run_directory
from unisono.training.checkpoint.files import load_first, load_newest, load_step, remove, save, tidy
from unisono.training.checkpoint.layout import Checkpoint, DamagedCheckpoint, checkpoint_names, read_progress, step_of
from unisono.training.player import Run
from unisono.training.state import rename_unused

FOLDER = "workers"


def worker_folder(home: Path, worker: int) -> Path:
    """Return the folder of a worker's snapshots."""
    return home / FOLDER / f"worker-{worker}"


@dataclass
class WorkerCounters:
    """Progress of a worker: that of its last header, and of the reply before."""

    step: int = 0
    """Number of steps that it has made."""
    samples: int = 0
    """Samples of the steps since the header before."""
    loss: float = 0.0
    """Sum of the loss over these samples."""
    known: int = 0
    """Samples of all workers, as the reply before had them."""


def take(state: dict[str, Any], optimizer: torch.optim.Optimizer, buffers: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return copies of a worker's weights and optimizer state, with `buffers` as they were before the step.

    `state` is the model's state_dict from the beginning, whose tensors are the model's own: to read it from the model
    would wait for the updates that follow.
    """
    weights = {name: _copy(value) for name, value in state.items()}
    weights.update({name: value for name, value in buffers.items() if name in weights})
    return {"weights": weights, "optimizer": _copy(torch.optim.Optimizer.state_dict(optimizer))}


def buffers_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the model's buffers, by name."""
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copy(one) for key, one in value.items()}
    return [_copy(one) for one in value] if isinstance(value, list) else value


def save_worker(home: Path, worker: int, cut: int, state: dict[str, Any], counters: WorkerCounters) -> None:
    """Write a worker's snapshot for the checkpoint `cut`."""
    save(worker_folder(home, worker), Checkpoint(cut, state["weights"], state["optimizer"], asdict(counters)))


def save_centre(home: Path, cut: int, weights: dict[str, Any], replies: Sequence[Reply], data: str) -> None:
    """Write the centre as it came with the servers' replies, and the progress of the run before that exchange.

    Another worker may be writing an earlier or a later one.
    """
    progress = {
        "epoch": replies[0].epoch,
        "data": data,
        "seconds": replies[0].elapsed,
        "servers": [one.encode().tolist() for one in replies],
    }
    save(home / run_directory.CHECKPOINTS, Checkpoint(cut, weights, {}, progress), alone=False)


@dataclass(frozen=True)
class CentrePoint:
    """The centre that a run resumes from."""

    cut: int
    weights: dict[str, Any]
    replies: tuple[Reply, ...]
    """Reply of each server to the exchange of the cut."""
    data: str
    """Fingerprint of the data."""
    damaged: tuple[DamagedCheckpoint, ...] = ()
    """Centres that were to be used, and are damaged."""

    @property
    def reply(self) -> Reply:
        """Reply of the first server, which knows the progress of the run."""
        return self.replies[0]

    @property
    def numbers(self) -> tuple[int, ...]:
        """Number of exchanges that each server had served."""
        return tuple(one.number for one in self.replies)


def load_centre(home: Path, seats: SeatCounts | None = None) -> CentrePoint | None:
    """Return the newest complete centre; None where the run has stored none. With `seats`, those of a run that resumes,
    one that has the snapshots of all workers goes before newer ones.

    Raises CheckpointError where none can be read, or the run had another kind of rule.
    """
    folder = home / run_directory.CHECKPOINTS
    names = {step_of(name): name for name in checkpoint_names(folder)}
    if not names:
        return None
    if seats is None:
        order = sorted(names, reverse=True)
    else:
        kept = [checkpoint_names(worker_folder(home, worker)) for worker in range(seats.workers)]
        cuts = {cut: _who_trained(home, folder, name, seats) for cut, name in names.items()}
        order = cuts_to_try(cuts, [[step_of(name) for name in one] for one in kept])
    found, damaged = load_first(folder, [names[cut] for cut in order])
    if "servers" not in found.progress:
        raise CheckpointError(
            f"{folder} has the checkpoint of a rule without servers, which an asynchronous rule cannot resume: begin a "
            "new run"
        )
    replies = (decode_reply(torch.tensor(one, dtype=torch.float64)) for one in found.progress["servers"])
    return CentrePoint(found.step, found.weights, tuple(replies), found.progress["data"], tuple(damaged))


def _who_trained(home: Path, folder: Path, name: str, seats: SeatCounts) -> set[int]:
    """Return the workers that had to leave a snapshot for a centre; none where a run with `seats` cannot use them."""
    progress = read_progress(folder, name)
    if progress is None or len(progress.get("servers", ())) != seats.servers:
        return set()
    reply = decode_reply(torch.tensor(progress["servers"][0], dtype=torch.float64))
    if not reply.orders & Order.SAVE or len(reply.workers) != seats.workers:
        return set()  # nobody trains any more beside the final centre
    events = read_events(home, 0) if 0 in logged_servers(home) else []
    return set(range(seats.workers)) - dead_before(events, reply.number)


def discard_snapshots(home: Path, cut: int) -> None:
    """Remove the snapshots of all workers that are newer than `cut`, from which a run resumes; with -1 all of them.

    A later checkpoint may have the name of a removed one: its workers must not find an old snapshot there. Raises
    CheckpointError where one cannot be removed.
    """
    for folder in sorted((home / FOLDER).glob("worker-*")):
        for name in checkpoint_names(folder):
            if step_of(name) > cut:
                remove(folder / name)


def cuts_to_try(cuts: Mapping[int, Collection[int]], snapshots: Sequence[Collection[int]]) -> list[int]:
    """Return the cuts in the order in which a run tries to resume from them.

    `cuts` has the workers that trained at the cut of each stored centre; `snapshots` the cuts for which each worker has
    left one.

    >>> cuts_to_try({412: [0, 1], 450: [0, 1], 455: [0, 1]}, [[412, 450, 455], [412]])
    [412, 455, 450]
    """
    newest = sorted(cuts, reverse=True)
    whole = [cut for cut in newest if all(cut in snapshots[worker] for worker in cuts[cut])]
    return whole + [cut for cut in newest if cut not in whole]


def dead_before(events: Iterable[Mapping[str, Any]], number: int) -> set[int]:
    """Return the workers that had died before exchange `number`, and had not come back."""
    dead = set[int]()
    for event in events:
        if "died" in event and event["number"] <= number:
            dead.add(event["died"])
        elif "worker" in event and event["number"] < number:
            dead.discard(event["worker"])
    return dead


@dataclass(frozen=True)
class Beginning:
    """State in which a run begins, the same on all ranks but for `snapshot`."""

    states: tuple[RunState, ...]
    """State of each server."""
    notes: tuple[str, ...] = ()
    """Lines to report."""
    recorded: tuple[tuple[int, ...], ...] | None = None
    """Order of each server in the run that is replayed."""
    seconds: float = 0.0
    """Seconds that the run had taken before."""
    snapshot: Checkpoint | None = None
    """State of this rank's worker; None where it begins at the centre."""


def begin_new(seats: SeatCounts) -> Beginning:
    """Return the beginning of a new run."""
    return Beginning((begin(seats.workers),) * seats.servers)


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
    note = f"replays {sum(map(len, orders))} exchanges of {source}"
    return replace(begin_new(seats), notes=(note,), recorded=orders)


def begin_resumed(rule: BaseAsynchronousRule, run: Run) -> Beginning:
    """Load the newest centre into the model. Return the beginning.

    Called by all ranks together. Raises CheckpointError for other data.
    """
    world, home, data = run.world, run.home, run.feed.fingerprint
    seats = rule.seats(world.size)
    point = world.call_on_root(lambda: load_centre(home, seats))
    if point is None:
        world.call_on_root(lambda: discard_newer(home, [], -1))
        return replace(begin_new(seats), notes=(f"{home} has no checkpoint yet: the run begins again",))
    if point.data != data:
        raise CheckpointError(f"the run was trained on other data ({point.data}) than now ({data}): begin a new run")
    run.trainer.model.load_state_dict(point.weights)
    alike = len(point.reply.workers) == seats.workers and len(point.numbers) == seats.servers
    trains = world.rank < seats.workers
    mine = load_step(worker_folder(home, world.rank), point.cut) if alike and trains else None
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
    return Beginning(states, tuple(notes), seconds=point.reply.elapsed, snapshot=mine)


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
