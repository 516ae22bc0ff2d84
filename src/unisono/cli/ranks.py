"""Common parts of the commands that measure on ranks: joining a world, and writing files."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.errors import UsageError
from unisono.files import write_atomically

if TYPE_CHECKING:
    from unisono.world import World


def join(what: str, alone: bool = False) -> World:
    """Return the world of the ranks that a launcher has started; one rank reports bad input. `what` is the command.

    Raises UsageError for a single rank, unless the command can do with it `alone`.
    """
    from unisono.initialize import init
    from unisono.mpi import MPI

    try:
        world = init()
    except UsageError as error:
        if MPI.COMM_WORLD.rank:
            raise SystemExit(2) from error
        raise
    with world.agree_on_errors():
        if world.size == 1 and not alone:
            raise UsageError(f"a single rank cannot communicate; start several: mpiexec -n 4 unisono {what}")
    return world


def write_text(world: World, path: Path, text: str) -> None:
    """Write a whole file, on rank 0. Raises UsageError, on all ranks, where that fails."""

    def action() -> None:
        with write_atomically(path) as temporary:
            temporary.write_text(text, encoding="utf-8")

    write(world, path, action)


def write(world: World, path: Path, action: Callable[[], object]) -> None:
    """Write something into `path`, on rank 0. Raises UsageError, on all ranks, where that fails."""
    with world.agree_on_errors():
        world.call_on_root(partial(write_alone, path, action))


def write_alone(path: Path, action: Callable[[], object]) -> None:
    """Write something into `path`, in this process. Raises UsageError where that fails."""
    try:
        action()
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
