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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from unisono.asynchronous.decisions import RunState, afresh, begin, resized, resumed_states
from unisono.asynchronous.event_log import logged_servers, read_events, read_order, truncate_events
from unisono.asynchronous.link import survives_deaths
from unisono.asynchronous.messages import Order, Reply, decode_reply
from unisono.data.feed import is_same_data
from unisono.errors import CheckpointError, UsageError
from unisono.mpi import MPI
from unisono.rules.asynchronous import BaseAsynchronousRule
from unisono.step.rule import SeatCounts
from unisono.training import run_directory
from unisono.training.checkpoint import files
from unisono.training.checkpoint.layout import (
    Checkpoint,
    DamagedCheckpointError,
    checkpoint_name,
    checkpoint_names,
    read_progress,
    step_of,
)
from unisono.training.state import RunPoint, check_change, find_checkpoint, fitting

if TYPE_CHECKING:
    from unisono.training.recipe import Recipe
    from unisono.training.run import Run

FOLDER = "workers"


def worker_folder(home: Path, worker: int) -> Path:
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


def centre_checkpoint(cut: int, weights: dict[str, Any], replies: Sequence[Reply], data: str) -> Checkpoint:
    """Return the checkpoint of a centre as it came with the servers' replies, and of the progress before that exchange;
    `data` is the fingerprint of the data."""
    servers = [reply.encode().tolist() for reply in replies]
    progress = {"epoch": replies[0].epoch, "data": data, "seconds": replies[0].elapsed, "servers": servers}
    return Checkpoint(cut, weights, {}, progress)


class CentrePoint(NamedTuple):
    """Centre that a run resumes from."""

    centre: Checkpoint
    replies: tuple[Reply, ...]
    """Reply of each server to the exchange of the cut; the first server knows the progress of the run."""
    damaged: list[DamagedCheckpointError]
    """Centres that were to be used, and are damaged."""

    @property
    def seats(self) -> SeatCounts:
        return SeatCounts(len(self.replies[0].workers), len(self.replies))


def load_cut(home: Path, seats: SeatCounts | None = None) -> CentrePoint | None:
    """Return the newest complete centre; None where the run has stored none. With `seats`, those of a run that resumes,
    a centre that has the snapshots of all workers goes before newer ones. Raises CheckpointError where none can be
    read, or the run had another kind of rule."""
    newest = find_checkpoint(home, None if seats is None else _names_to_try(home, seats))
    if newest is None:
        return None
    centre, damaged = newest
    if "servers" not in centre.progress:
        raise CheckpointError(
            f"{home / run_directory.CHECKPOINTS} has the checkpoint of a rule without servers, which an asynchronous "
            "rule cannot resume: begin a new run"
        )
    return CentrePoint(centre, tuple(map(_reply, centre.progress["servers"])), damaged)


def _names_to_try(home: Path, seats: SeatCounts) -> list[str]:
    """Return the names of the centres in the order in which a run with these seats tries to resume from them."""
    by_cut = {step_of(name): name for name in checkpoint_names(home / run_directory.CHECKPOINTS)}
    trained = {cut: _who_trained(home, name, seats) for cut, name in by_cut.items()}
    folders = [worker_folder(home, worker) for worker in range(seats.workers)]
    kept = [[step_of(name) for name in checkpoint_names(folder)] for folder in folders]
    return [by_cut[cut] for cut in cuts_to_try(trained, kept)]


def _reply(numbers: Sequence[float]) -> Reply:
    return decode_reply(torch.tensor(numbers, dtype=torch.float64))


def _who_trained(home: Path, name: str, seats: SeatCounts) -> set[int]:
    """Return the workers that had to leave a snapshot for a centre; none where a run with `seats` cannot use them."""
    progress = read_progress(home / run_directory.CHECKPOINTS / name)
    if progress is None or len(progress.get("servers", ())) != seats.servers:
        return set()
    reply = _reply(progress["servers"][0])
    if not reply.orders & Order.SAVE or len(reply.workers) != seats.workers:
        return set()  # nobody trains any more beside the final centre
    events = read_events(home, 0) if 0 in logged_servers(home) else []
    return set(range(seats.workers)) - dead_before(events, reply.exchanges)


def cuts_to_try(cuts: Mapping[int, Collection[int]], snapshots: Sequence[Collection[int]]) -> list[int]:
    """Return the cuts in the order in which a run tries to resume from them.

    `cuts` has the workers that trained at the cut of each stored centre; `snapshots` the cuts for which each worker has
    left a snapshot.

    >>> cuts_to_try({412: [0, 1], 450: [0, 1], 455: [0, 1]}, [[412, 450, 455], [412]])
    [412, 455, 450]
    """
    newest = sorted(cuts, reverse=True)
    complete = [cut for cut in newest if all(cut in snapshots[worker] for worker in cuts[cut])]
    return complete + [cut for cut in newest if cut not in complete]


def dead_before(events: Iterable[Mapping[str, Any]], exchange: int) -> set[int]:
    """Return the workers that had died before an exchange, by its number, and had not come back."""
    dead = set[int]()
    for event in events:
        if "died" in event and event["number"] <= exchange:
            dead.add(event["died"])
        elif "worker" in event and event["number"] < exchange:
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


def begin_new(seats: SeatCounts) -> Beginning:
    return Beginning((begin(seats.workers),) * seats.servers)


def begin_replay(seats: SeatCounts, source: Path) -> Beginning:
    """Return the beginning of a replay of the run in `source`. Raises CheckpointError where that has no complete log,
    UsageError where it had another number of workers or servers."""
    logs = logged_servers(source)
    if len(logs) != seats.servers:
        raise UsageError(
            f"{source} has the events of {len(logs)} servers, and {seats.servers} are to serve: replay it on as many "
            "ranks, by the same rule"
        )
    cut = load_cut(source)
    if cut is None:
        raise CheckpointError(f"{source} has no checkpoint of a centre to compare with: it ended before its first one")
    if cut.seats.workers != seats.workers:
        raise UsageError(
            f"{source} was trained by {cut.seats.workers} workers, and {seats.workers} are to replay it: start "
            f"as many ranks as it had"
        )
    for server in logs:
        for event in read_events(source, server):
            if "inexact" in event:
                raise CheckpointError(f"{source} cannot be replayed: {event['inexact']}")
    orders = tuple(tuple(read_order(source, server, reply.exchanges)) for server, reply in enumerate(cut.replies))
    note = f"replays {sum(map(len, orders))} exchanges of {source}"
    return replace(begin_new(seats), notes=(note,), recorded=orders)


def begin_resumed(rule: BaseAsynchronousRule, run: Run, before: Recipe) -> Beginning:
    """Load the newest centre into the model. Return the beginning. Collective. Raises CheckpointError for other data,
    RecipeError for changes of the recipe `before` that snapshots, each within an epoch of its own, cannot take."""
    world, home, data = run.world, run.home, run.feed.fingerprint
    seats = rule.seats(world.size)
    cut = world.call_on_root(lambda: load_cut(home, seats))
    if cut is None:
        world.call_on_root(lambda: discard_after(home, -1, []))
        return replace(begin_new(seats), notes=(f"{home} has no checkpoint yet: the run begins again",))
    centre, first = cut.centre, cut.replies[0]
    if not is_same_data(trained := centre.progress["data"], data):
        raise CheckpointError(f"the run was trained on other data ({trained}) than now ({data}): begin a new run")
    with fitting(f"step {centre.step}'s checkpoint"):
        files.load_weights(run.trainer.model, centre.weights)
    had, alike, trains = cut.seats, cut.seats == seats, world.rank < seats.workers
    # the final centre may have the name of a cut before the last exchange, whose snapshot would make that again
    own, name = worker_folder(home, world.rank), checkpoint_name(centre.step)
    usable = alike and trains and first.orders & Order.SAVE and name in checkpoint_names(own)
    snapshot = files.load_first(own, [name])[0] if usable else None
    lacking = [rank for rank, has in enumerate(world.all_gather_object(snapshot is not None or not trains)) if not has]
    rounds = 1 + first.samples_before % run.feed.samples // before.training.batch  # at least one is under way
    done = rounds if len(lacking) < seats.workers else 0  # at the centre an epoch of their own matters no more
    check_change(before, run.recipe, RunPoint(done=done, step=1, data=data), data)
    states, note = resumed_states(cut.replies), ""
    if not alike:
        states = resized(states, *seats)
        note = f"the run had {had.workers} workers and {had.servers} servers: all workers begin at the centre"
    elif lacking:
        states = tuple(afresh(state, lacking) for state in states)
        note = f"worker {', '.join(map(str, lacking))} left no snapshot: it begins at the centre"
    inexact = _why_inexact(alike, lacking, rule.exchange.wire, seats.servers)
    numbers = [reply.exchanges for reply in cut.replies]
    notes = world.call_on_root(lambda: discard_after(home, centre.step, numbers, inexact, cut.damaged))
    notes.append(f"resumes after {first.exchanges} exchanges, {centre.step} steps of all workers")
    notes += [f"{note}, without state of the optimizer"] if note else []
    return Beginning(states, tuple(notes), seconds=first.elapsed, snapshot=snapshot)


def _why_inexact(alike: bool, lacking: Sequence[int], wire: str | None, servers: int) -> str:
    """Return why a replay from the start would not find the resumed run's weights; empty where it would."""
    if not alike:
        return "it was resumed with other numbers of workers or servers"
    if lacking:
        return f"it was resumed without the snapshots of workers {list(lacking)}"
    if wire is not None:
        return "it was resumed with a wire, by which the stored centre is rounded"
    return "it was resumed with several servers, whose cuts differ" if servers > 1 else ""


def discard_after(
    home: Path, cut: int, numbers: Sequence[int], inexact: str = "", damaged: Sequence[DamagedCheckpointError] = ()
) -> list[str]:
    """Remove the centres, events, metrics and snapshots that are newer than the checkpoint `cut`, to resume from it; -1
    where the run begins again. Rename `damaged` centres. Return lines to log.

    `numbers` are those of the servers' exchanges at the cut; other servers have none. `inexact` says why a replay of
    the whole log would find other weights, if it would. A later checkpoint may have the name of a removed one: its
    workers must not find an old snapshot there.
    """
    notes = files.discard_newer(home / run_directory.CHECKPOINTS, cut, damaged)
    run_directory.truncate_lines(home, cut - 1)  # the exchange of the cut is served again, and its epoch ends
    for server in logged_servers(home):
        truncate_events(home, server, numbers[server] if server < len(numbers) else 0, inexact)
    for folder in sorted((home / FOLDER).glob("worker-*")):
        files.remove_newer(folder, cut)
    return notes


def compare(home: Path, source: Path) -> str | None:
    """Return None where the final weights of two runs are equal bit for bit, else the first that differs."""
    replayed, recorded = (files.load_newest(run / run_directory.CHECKPOINTS)[0].weights for run in (home, source))
    for name, value in recorded.items():
        (tensors, outline), (others, expected) = (files.flatten_state(each, name) for each in (replayed[name], value))
        if outline != expected or not all(map(torch.equal, tensors.values(), others.values())):
            return name
    return None
