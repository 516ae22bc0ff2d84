"""Copies of a run's state in memory, on two hosts: ranks of the next generation begin with them, and read no disk.

    host a   /dev/shm/unisono-run-KEY/step-000000118/     rank 0's state
    host b   /dev/shm/unisono-run-KEY/step-000000118/     the same, by the first rank of the second host

A thread writes them beside the steps, as often as that is cheap. They have the files and checksums of a checkpoint. If
both hosts are lost, the newest checkpoint of the run's folder is used. Where only rank 0 has the whole state (shards,
split layers, weights of ranks), it sends that to the second host, between two steps.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch

from unisono.errors import CheckpointError
from unisono.files import check_own, temporary_beside
from unisono.training import run_directory
from unisono.training.checkpoint.files import copied, decode, encode, flatten_state, load_newest, save, unflatten_state
from unisono.training.checkpoint.layout import TENSORS, Checkpoint
from unisono.world import World

COPIES_KEPT = 2
"""Copies on a host: one is whole while the next is written."""

MAX_SHARE = 0.02
"""Largest share of the run's time that copies take."""

MAX_MESSAGE_BYTES = 1 << 30

THREAD = "unisono copies"
"""Name of the thread that writes a copy."""


class MemoryCopies:
    """Copies that this rank writes, and the time between them."""

    def __init__(
        self,
        folder: Path,
        home: Path,
        world: World,
        alike: bool,
        warn: Callable[[str], None],
        checkpoint_minutes: float = 0.0,
    ) -> None:
        """Write into `folder`, and tell so in the run's folder, `home`.

        `alike` is true if all ranks have the state of rank 0; else it sends its own. `warn` is called with a line where
        no copy can be written. Rank 0's copy is a checkpoint in `home` as well once the newest one there is so many
        minutes old; 0: never.
        """
        nodes = world.placement.nodes
        first_node = next(ranks for ranks in nodes if 0 in ranks)
        second = next((ranks[0] for ranks in nodes if ranks is not first_node), 0)
        self._folder, self._home, self._world, self._warn = folder, home, world, warn
        self._first, self._saving, self._step, self._warned = True, 0.0, -1, set[str]()
        self._untold = f"{home} does not tell of them"
        self._writes, self._alone = world.rank in (0, second), second == 0
        self._checkpoint_seconds = 60 * checkpoint_minutes if world.rank == 0 else 0.0
        self._receiver = 0 if alike else second  # rank 0 receives nothing
        self._began = time.monotonic()
        self._thread = threading.Thread(name=THREAD)
        for thread in threading.enumerate():  # of a generation that this process has survived
            if thread.name == THREAD:
                thread.join()
        self.seconds = 0.0
        """Seconds between two copies; at first none: a generation that makes a step has not been for nothing."""

    @property
    def writing(self) -> bool:
        """True while the last copy of this rank is being written."""
        return self._thread.is_alive()

    def due(self) -> bool:
        """Return True if it is time for a copy. Rank 0 asks all others for it."""
        return not self.writing and time.monotonic() - self._began > self.seconds

    def write(self, make: Callable[[], Checkpoint], last: bool = False) -> None:
        """Write a copy of what `make` returns, which all ranks call together. It is written beside the steps, but for
        the first one. The `last` one before the end is written to the disk where rank 0's memory takes none."""
        # before the wait: nobody else waits for this rank's disk
        held = torch.tensor(int(self._writes), device="cpu")
        lost, kept = not self._writes, bool(self._world.allreduce(held, op="maximum"))
        self.wait()
        began = time.monotonic()
        checkpoint = make()
        if self._world.rank == 0:
            with self._warning(self._untold):
                (self._home / run_directory.ALIVE).touch()
                if lost:  # the other host has the copy before this one, or none has any
                    (self._home / run_directory.ALIVE).write_text(f"{self._step}" if kept else "")
                if self._first:
                    line = {"first_step": checkpoint.step, "ranks": self._world.size, "time": time.time()}
                    run_directory.add_line(self._home / run_directory.GENERATIONS, line)
        first, self._first, self._step = self._first, False, checkpoint.step
        writes = self._writes or self._checkpoint_seconds or (last and self._world.rank == 0)
        if self._receiver and self._world.rank == self._receiver:
            checkpoint = _receive(self._world)
        elif writes:
            checkpoint = replace(checkpoint, **{name: copied(getattr(checkpoint, name)) for name in TENSORS})
        if writes:
            self._thread = threading.Thread(target=self._save, args=(checkpoint, last), name=THREAD)
            self._thread.start()
        if self._receiver and self._world.rank == 0:  # a death meanwhile leaves its own copy
            _send(self._world, self._receiver, checkpoint)
        self._began = time.monotonic()
        self.seconds = (self._began - began + self._saving) / MAX_SHARE
        if first:
            self.wait()

    def wait(self) -> None:
        if self.writing:
            self._thread.join()

    @contextmanager
    def _warning(self, lacking: str) -> Iterator[None]:
        """Within the block, which writes into the run's folder, warn once of what is `lacking` where that is full."""
        try:
            yield
        except (OSError, CheckpointError) as error:
            if lacking not in self._warned:
                self._warn(f"copies in memory go on, but {lacking}: {error}")
            self._warned.add(lacking)

    def _save(self, checkpoint: Checkpoint, last: bool) -> None:
        if self._writes:
            self._copy(checkpoint)
        checkpoints = self._home / run_directory.CHECKPOINTS
        alone = last and self._world.rank == 0 and not self._writes  # no memory has a copy
        if self._checkpoint_seconds or alone:
            with self._warning("the disk takes no checkpoint"):
                checkpoints.mkdir(exist_ok=True)  # its time is that of its newest checkpoint, or of the first copy
                if alone or time.time() - checkpoints.stat().st_mtime > self._checkpoint_seconds:
                    save(checkpoints, checkpoint)

    def _copy(self, checkpoint: Checkpoint) -> None:
        began = time.thread_time()  # of the processor: other processes may have it meanwhile
        try:
            check_own(self._folder)
            save(self._folder, checkpoint, COPIES_KEPT)
            if self._world.rank == 0:
                alive = self._home / run_directory.ALIVE
                # not synced: no copy in memory outlives a power cut
                with self._warning(self._untold), temporary_beside(alive) as path:
                    path.write_text(f"{checkpoint.step}")
                    path.replace(alive)
        except CheckpointError as error:
            self._writes = False
            shutil.rmtree(self._folder, ignore_errors=True)
            if self._world.rank == 0 and self._alone:
                with self._warning(self._untold):
                    (self._home / run_directory.ALIVE).write_text("")  # no copy is left
            other = "" if self._alone else "that of the other host, or "
            self._warn(f"no copy in memory here any more: after a death {other}the newest checkpoint is used: {error}")
        self._saving = time.thread_time() - began


def _send(world: World, to: int, checkpoint: Checkpoint) -> None:
    """Send a checkpoint, tensor by tensor: no second one is in this rank's memory."""
    states = {name: flatten_state(getattr(checkpoint, name), f"the run's {name}") for name in TENSORS}
    forms = {
        name: (outline, {key: (tensor.shape, tensor.dtype) for key, tensor in tensors.items()})
        for name, (tensors, outline) in states.items()
    }
    world.comm.send((checkpoint.step, checkpoint.progress, forms), to)
    for tensors, _ in states.values():
        for tensor in tensors.values():
            for piece in _pieces(tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()):
                world.comm.Send(piece, to)


def _receive(world: World) -> Checkpoint:
    """Return the checkpoint that rank 0 sends."""
    step, progress, forms = world.comm.recv(source=0)
    states = {}
    for name, (outline, shapes) in forms.items():
        tensors = {key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in shapes.items()}
        for tensor in tensors.values():
            for piece in _pieces(tensor):
                world.comm.Recv(piece, 0)
        states[name] = unflatten_state(outline, tensors)
    return Checkpoint(step, **states, progress=progress)


def _pieces(tensor: torch.Tensor) -> list[Any]:
    """Return the memory of a tensor without gaps as arrays of bytes that any MPI library sends."""
    flat = tensor.reshape(-1).view(torch.uint8).numpy()
    return [flat[start : start + MAX_MESSAGE_BYTES] for start in range(0, len(flat), MAX_MESSAGE_BYTES)]


def newest_copy(folder: Path, world: World) -> Checkpoint | None:
    """Return the newest copy of all hosts, on all ranks; None without one. Called by all ranks together."""
    copy: Checkpoint | None = None
    if folder.exists() and world.rank == world.placement.nodes[world.placement.node_of(world.rank)][0]:
        with suppress(CheckpointError):  # none that is whole
            check_own(folder)
            copy, _ = load_newest(folder)
    steps = torch.full((world.size,), -1)
    steps[world.rank] = -1 if copy is None else copy.step
    newest, root = map(int, world.allreduce(steps, op="maximum").max(0))
    if newest < 0:
        return None
    parts = encode(copy) if world.rank == root and copy is not None else [b""] * (1 + len(TENSORS))
    lengths = world.broadcast(torch.tensor([*map(len, parts)]), root).tolist()
    sent = torch.empty(sum(lengths), dtype=torch.uint8)
    if world.rank == root:
        sent = torch.frombuffer(bytearray().join(parts), dtype=torch.uint8)
    content = world.broadcast(sent, root).numpy().data
    return decode([bytes(content[start:end]) for start, end in pairwise(accumulate(lengths, initial=0))])
