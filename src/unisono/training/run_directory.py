"""The directory of a run: its recipe, a line of metrics for each epoch, and checkpoints.

runs/digits-20260131-120000/
├── recipe.toml
├── .lock                  while a run uses the directory: the process
├── prediction.json        sealed prediction of a step; prediction-2.json of the first resumption
├── measurement.json       measured step, at the end of the run
├── metrics.jsonl
├── log.txt                lines that were shown, and details
├── chain.jsonl            hashes of each step, with `[audit] chain`: `chain.py`
├── generations.jsonl      of an elastic run: a line for the first step of each generation of ranks, and one for its end
├── .alive                 of an elastic run: touched by rank 0 whenever the state is copied into memory
├── events/                of an asynchronous run: server-0.jsonl, the exchanges of each server, in order
├── workers/               the same: worker-0/, the state of each worker, as checkpoints/ has the centre's
├── convolutions.json      timings of convolution algorithms
├── evaluation.json        measures of a checkpoint on a test set, and confusion.svg: `scoring/`
├── steps/
│   └── epoch-0001.npz     seconds[rank, step, kind], and the names of the kinds
└── checkpoints/
"""

from __future__ import annotations

import datetime
import errno
import fcntl
import json
import os
import socket
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tomli_w

from unisono.errors import CheckpointError, UsageError
from unisono.files import naming_os_errors, write_atomically
from unisono.startup import stat_of
from unisono.training.checkpoint.layout import DamagedCheckpointError, checkpoint_names, read_manifest, step_of
from unisono.training.recipe import Recipe, read_recipe, to_dict

RECIPE, METRICS, STEPS, CHECKPOINTS = "recipe.toml", "metrics.jsonl", "steps", "checkpoints"
CONVOLUTIONS, LOG, GENERATIONS = "convolutions.json", "log.txt", "generations.jsonl"
ALIVE, CHAIN = ".alive", "chain.jsonl"


def create_run(recipe: Recipe, folder: Path | None, lock: RunLock | None) -> Path:
    """Make a run's directory, `folder` or a new one under runs/, `lock` it (None: another process does), and write the
    recipe. Return it. Raises UsageError where it cannot be made, is in use, or holds a run already."""
    folder = folder or new_folder(recipe.name)
    with naming_os_errors(f"cannot create the run's folder {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        if lock is not None:
            lock.take(folder)
        check_unused(folder)
    write_recipe(folder, recipe)
    return folder


def new_folder(name: str) -> Path:
    """Return the folder of a new run of a recipe, under runs/; it is not made. Raises UsageError for a name that is no
    name of a folder."""
    if name in ("", ".", "..") or "/" in name:
        raise UsageError(f"name = {name!r}; it begins the name of a folder: not empty, and without /")
    stamp = datetime.datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    folder, count = Path("runs") / f"{name}-{stamp}", 1
    while folder.exists():
        count += 1
        folder = Path("runs") / f"{name}-{stamp}-{count}"
    return folder


def check_unused(folder: Path) -> None:
    """Check that a folder holds no run. Raises UsageError with the remedy if it does, and OSError."""
    if (folder / RECIPE).exists():
        raise UsageError(f"{folder} holds a run already; resume it with --resume {folder}")


def write_recipe(folder: Path, recipe: Recipe) -> None:
    replace_file(folder / RECIPE, tomli_w.dumps(to_dict(recipe)).encode())


def recipe_of(folder: Path, changes: list[str]) -> Recipe:
    """Return the recipe of a run, with changes applied. Raises UsageError where there is none, or it cannot be read."""
    with naming_os_errors(f"cannot read {folder / RECIPE}"):
        if not (folder / RECIPE).exists():
            raise UsageError(f"{folder} holds no run: there is no {RECIPE} in it")
    return read_recipe(folder / RECIPE, changes)


def past_recipe(folder: Path) -> Recipe:
    """Return the recipe of a run whose files are read; raises as `recipe_of`. The period of its rule, which an older
    release may have measured, is left at the default."""
    return recipe_of(folder, ["rule.every=16"])


def add_metrics(folder: Path, line: dict[str, Any]) -> None:
    add_line(folder / METRICS, line)


def add_line(path: Path, line: dict[str, Any]) -> None:
    """Append a line of JSON to a file of the run. Raises CheckpointError where the disk refuses."""
    with _writing(path), path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics, one for each epoch that has ended, but for a last one that is half written. Raises
    UsageError for a damaged line."""
    path = folder / METRICS
    lines = path.read_text().splitlines() if path.exists() else []
    try:
        return [json.loads(line) for line in lines if line.endswith("}")]
    except ValueError as error:
        raise UsageError(f"{path}: a line is no JSON: {error}; remove it") from error


def write_steps(folder: Path, epoch: int, seconds: npt.NDArray[np.float32], kinds: Sequence[str]) -> None:
    """Write the times of an epoch's steps made since the run began or resumed: `seconds` is (ranks, steps, kinds)."""
    path = folder / STEPS / f"epoch-{epoch:04d}.npz"
    with _writing(path):
        path.parent.mkdir(exist_ok=True)
        with write_atomically(path) as aside, aside.open("wb") as file:
            np.savez_compressed(file, seconds=seconds, kinds=np.array(kinds))


def truncate_lines(folder: Path, step: int) -> None:
    """Remove lines of metrics and of the chain that are newer than `step`, where the run resumes, or were cut off when
    it was killed; a line without a step stays."""

    def belongs(line: bytes) -> bool:
        try:
            reached = json.loads(line)["step"]
        except ValueError:
            return False
        except (KeyError, TypeError):
            return True
        return not isinstance(reached, int) or reached <= step

    for path in (folder / METRICS, folder / CHAIN):
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        kept = [line for line in lines if line.endswith(b"\n") and belongs(line)]
        if kept != lines:
            replace_file(path, b"".join(kept))


def replace_file(path: Path, content: bytes) -> None:
    """Write a file atomically. Raises CheckpointError naming it and a remedy."""
    with _writing(path), write_atomically(path) as aside:
        aside.write_bytes(content)


def _writing(path: Path) -> AbstractContextManager[None]:
    """Return a block that turns an OSError into a CheckpointError that names a remedy."""
    remedy = "; free space or repair the disk, then resume with --resume"
    return naming_os_errors(f"cannot write {path}", CheckpointError, remedy)


def is_finished(run: Path, epochs: int) -> bool:
    """Return True where the run in `run` has metrics of `epochs` epochs, and the last one's checkpoint is complete."""
    names, metrics = checkpoint_names(run / CHECKPOINTS), read_metrics(run)
    last = metrics[-1] if metrics else {}
    if not names or last.get("epoch", 0) < epochs or last.get("step") != step_of(names[-1]):
        return False
    try:
        read_manifest(run / CHECKPOINTS / names[-1])
    except DamagedCheckpointError:
        return False
    return True


def report_if_finished(run: Path, recipe: Recipe) -> bool:
    """Return True where the run in `run` has all epochs of its recipe, and print a line that names what to set."""
    if not is_finished(run, recipe.training.epochs):
        return False
    epochs = read_metrics(run)[-1]["epoch"]
    print(
        f"{run} is finished, with {epochs} epochs; to train longer, add --set training.epochs=N, with N above {epochs}",
        flush=True,
    )
    return True


# Lock ---------------------------------------------------------------------------------------------------------------

LOCK = ".lock"

NO_FLOCK = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
"""Error numbers of file systems without `flock`."""


class RunLock:
    """Lock that keeps a folder to one run at a time, taken by one rank for all. It opens when its holder ends, however
    that ends.

        RUN/.lock    {"host": "node-a", "process": 4711, "born": "8812033", "since": "2026-01-31T12:00:00+01:00"}

    The file is locked by `flock` and removed at the end. The kernel releases the lock when the holder dies, on NFS too.
    Where a file system has no `flock`, the file itself is the lock; it does not count once its holder on this host is
    dead. In an elastic run the command holds it, not a rank: a host that is cut off may not keep it.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._descriptor = -1

    def take(self, folder: Path) -> None:
        """Take the lock of `folder`. Raises UsageError naming the holder, or the file system's error."""
        path = folder / LOCK
        with naming_os_errors(f"cannot lock the run's folder: {path}"):
            while not self._taken(path):
                pass  # its holder has just removed the file, or has died
        self._path = path

    def release(self) -> None:
        if self._path is None:
            return
        with suppress(OSError):  # a disk that is gone: an error that tells of it may be on its way
            self._path.unlink(missing_ok=True)  # before it opens: the next one makes a file of its own
        os.close(self._descriptor)
        self._path, self._descriptor = None, -1

    def _taken(self, path: Path) -> bool:
        """Try once to take the lock; return False where the file belonged to a holder that is gone."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            holder = os.pread(descriptor, 4096, 0)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UsageError(_in_use(path, holder)) from error
            except OSError as error:
                if error.errno not in NO_FLOCK:
                    raise
                return self._taken_without_flock(path, holder)
            try:
                if not os.path.samestat(os.fstat(descriptor), path.stat()):
                    return False
            except FileNotFoundError:
                return False
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, _mine(), 0)
            self._descriptor, descriptor = descriptor, -1
            return True
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _taken_without_flock(self, path: Path, holder: bytes) -> bool:
        if (known := _holder(holder)) is not None and known[0].may_live:
            raise UsageError(
                f"{_in_use(path, holder)}; this file system has no locks: if that run has ended, remove {path}"
            )
        aside = path.with_name(f"{LOCK}.{socket.gethostname()}.{os.getpid()}")
        try:
            path.rename(aside)
            faster = aside.read_bytes() != holder  # somebody has taken it between: it goes back
            if not faster:
                aside.write_bytes(_mine())
            os.link(aside, path)
        except (FileNotFoundError, FileExistsError):
            return False
        finally:
            aside.unlink(missing_ok=True)
        if faster:
            return False
        self._descriptor = os.open(path, os.O_RDONLY)
        return True


class Process(NamedTuple):
    """Process on a host, and when it began, in the kernel's ticks: a number is given again."""

    host: str
    process: int
    born: str

    @property
    def may_live(self) -> bool:
        """True unless it is known to be dead: on another host this cannot be known."""
        if not self.is_here:
            return True
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return self.born in ("", _born(self.process))

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()


def own_process() -> Process:
    return Process(socket.gethostname(), os.getpid(), _born(os.getpid()))


def _born(process: int) -> str:
    """Return the start time of a process; empty where it is dead, or not known."""
    fields = stat_of(process)
    return "" if fields[0] in ("", "Z", "X") else fields[19]


def _mine() -> bytes:
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    return json.dumps({**own_process()._asdict(), "since": now}).encode()


def _holder(content: bytes) -> tuple[Process, str] | None:
    """Return the holder in a lock's file, and since when it holds it; None where it has not written that yet."""
    try:
        holder = json.loads(content)
        return Process(holder["host"], holder["process"], holder["born"]), holder["since"]
    except (ValueError, KeyError, TypeError):
        return None


def _in_use(path: Path, content: bytes) -> str:
    holder = _holder(content)
    who = "another process" if holder is None else f"process {holder[0].process} on {holder[0].host}, since {holder[1]}"
    return f"{path.parent} is in use by {who}: one run at a time; wait for its end, or end it"
