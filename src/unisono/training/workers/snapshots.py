"""Checkpoints of an asynchronous run: the centre, and the state of each worker when it next sends its weights.

    server      ... 17  18 │ 19  20  21 ...      a cut before exchange 19: all that came before it is in the centre
    worker 0        17     │     20  saved as it was when it sent 20
    worker 1            18 │ 19      saved as it was when it sent 19; stores the centre that came back

    RUN/checkpoints/step-000000412/           the centre
    RUN/workers/worker-0/step-000000412/      weights, optimizer and progress of worker 0

A worker's state at its next exchange depends on earlier replies alone, so the files together are a state of the run
in which no message is under way: a consistent cut (Chandy and Lamport 1985). A run that resumes there serves the same
exchanges again, in whatever order they come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unisono.asynchronous.event_log import logged_servers, read_events
from unisono.asynchronous.messages import Order, Reply, WorkerHeader, decode_reply
from unisono.errors import CheckpointError
from unisono.step.rule import SeatCounts
from unisono.training import run_directory
from unisono.training.checkpoint import (
    Checkpoint,
    DamagedCheckpoint,
    checkpoint_names,
    load_first,
    load_step,
    read_progress,
    remove,
    save,
    step_of,
)
from unisono.training.workers.cuts import cuts_to_try, dead_before

FOLDER = "workers"


def worker_folder(home: Path, worker: int) -> Path:
    """Return the folder of a worker's snapshots."""
    return home / FOLDER / f"worker-{worker}"


@dataclass(frozen=True)
class WorkerSnapshot:
    """State of a worker when it sent its weights."""

    weights: dict[str, Any]
    optimizer: dict[str, Any]
    step: int
    """Number of steps that it had made."""
    samples: int
    """Samples of the steps since the header before."""
    loss: float
    """Sum of the loss over these samples."""
    known: int
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


def save_worker(home: Path, worker: int, cut: int, state: dict[str, Any], header: WorkerHeader, known: int) -> None:
    """Write a worker's snapshot for the checkpoint `cut`."""
    progress = {"step": header.step, "samples": header.samples, "loss": header.loss, "known": known}
    save(worker_folder(home, worker), Checkpoint(cut, state["weights"], state["optimizer"], progress))


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


def load_worker(home: Path, worker: int, cut: int) -> WorkerSnapshot | None:
    """Return a worker's snapshot for the checkpoint `cut`; None where there is none that is complete."""
    found = load_step(worker_folder(home, worker), cut)
    if found is None:
        return None
    progress = found.progress
    counters = progress["step"], progress["samples"], progress["loss"], progress["known"]
    return WorkerSnapshot(found.weights, found.optimizer, *counters)
