"""Generations of a run: ranks that train together until one dies, is stopped or joins; then the next ones go on.

    generation 1   ranks 0 1 2 3 ── step 120 ── kept 118 ── rank 2 dies: the launcher ends the others
    generation 2   ranks 0 1 2 3 ── from step 118 ... ── unisono join RUN: all save, and end
    generation 3   ranks 0 1 2 3 4 ── ...

Here are the decisions, `decide`, and what a generation is started with; `supervisor.py` starts them. Its ranks are
forked by processes that have PyTorch already (`standby.py`), and begin with the state that two hosts keep in memory
(`training/memory_copies.py`).
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

from unisono.elastic import attach
from unisono.elastic.standby import FOLDER_VARIABLE, GENERATION_VARIABLE
from unisono.errors import CheckpointError, UsageError
from unisono.launch import MEMORY_VARIABLE, SURVIVAL, SURVIVORS_VARIABLE, find_mpiexec, is_open_mpi
from unisono.training.checkpoint.layout import checkpoint_name, checkpoint_names, step_of
from unisono.training.recipe import Recipe
from unisono.training.recipe_check import check_run
from unisono.training.run_directory import ALIVE, CHECKPOINTS, RECIPE
from unisono.uncaught import EXCEPTION_CODE

MAX_FRUITLESS, MAX_FAILED_STARTS = 5, 2
"""Generations in a row that kept no new step, after which a run gives up: the same error would come again. Fewer where
none has kept a step yet, and each was ended by an exception of the program."""

SURVIVED = re.compile(rb"unisono: goes on from step (\d+) with the (\d+) ranks that are left \(generation (\d+)\)")
"""Line of the first of the ranks that go on in their processes (`survivors.py`)."""


@dataclass(frozen=True)
class Generation:
    """Ranks that are about to train together."""

    ranks: int
    number: int = 1
    step: int = -1
    """Newest step that was kept before it; -1 for none."""
    fruitless: int = 0
    """Generations before it, in a row, that kept no new step."""
    made: int = 0
    """Ranks of the last generation before it that kept a new step; 0 for none."""
    failed: int = field(default=0, repr=False)
    """Generations before it, in a row, that an exception has ended before any step was kept."""


@dataclass(frozen=True)
class End:
    """End of a generation."""

    code: int
    """Exit code of its launcher."""
    step: int
    """Newest step that is kept; -1 for none."""
    ranks: int
    """Ranks that there may be now."""
    joins: bool = False
    """True if it was ended so that the next one has other ranks."""
    stopped: bool = False
    """True if the user has ended the run."""


def decide(before: Generation, end: End, least: int) -> Generation | str:
    """Return the generation after one that has ended; "" where the run ends, or the reason why no other follows.

    Ranks that refuse to begin are followed by as many as have made a step.

    >>> decide(Generation(4, 1, step=-1), End(9, step=118, ranks=3), least=1)
    Generation(ranks=3, number=2, step=118, fruitless=0, made=4)
    >>> decide(Generation(3, 2, step=118, made=4), End(attach.BAD_INPUT, step=118, ranks=3), least=1)
    Generation(ranks=4, number=3, step=118, fruitless=1, made=4)
    >>> decide(Generation(4, 1), End(0, step=500, ranks=4), least=1)
    ''
    >>> decide(Generation(4, 1), End(9, step=118, ranks=1), least=2)
    'ranks are left for 1, and --min-ranks is 2'
    >>> decide(Generation(4, 2, fruitless=1, failed=1), End(EXCEPTION_CODE, step=-1, ranks=4), least=1)
    '2 generations in a row ended before a new step was kept'
    """
    made = before.ranks if end.step > before.step else before.made
    ranks = made if end.code == attach.BAD_INPUT else end.ranks
    if end.code == 0 or end.stopped or (end.code == attach.BAD_INPUT and made in (0, before.ranks)):
        return ""
    if end.ranks < least:
        return f"ranks are left for {end.ranks}, and --min-ranks is {least}"
    fruitless = 0 if end.joins or end.step > before.step else before.fruitless + 1
    failed = before.failed + 1 if end.code == EXCEPTION_CODE and end.step < 0 else 0
    if fruitless == MAX_FRUITLESS or failed == MAX_FAILED_STARTS:
        return f"{max(failed, fruitless)} generations in a row ended before a new step was kept"
    return Generation(ranks, before.number + 1, end.step, fruitless, made, failed)


@dataclass(frozen=True)
class ElasticRun:
    """A run of several generations."""

    home: Path
    """Folder of the run."""
    first: Sequence[str] = ()
    """Arguments of `unisono` for ranks that begin, or resume with changes."""
    later: Sequence[str] = ()
    """Arguments for ranks that go on."""
    least: int = 1
    """Number of ranks below which the run ends."""
    hosts: Sequence[str] = ()
    """Hosts of the ranks, each of which has as many; none for this machine."""
    mpiexec: Path = field(default_factory=find_mpiexec)
    recipe: Recipe | None = None
    """Recipe that it trains; None for a program."""
    ranks: int = 0
    """Ranks at the start; 0: not told."""
    command_key: str = field(default_factory=partial(secrets.token_hex, 4))
    """Name of the command that plays it: one after it has other ranks, and takes no copies of theirs."""

    @property
    def key(self) -> str:
        """Name that is this run's on every host: of its folder and this user."""
        return f"{hashlib.sha256(str(self.home.absolute()).encode()).hexdigest()[:16]}-{os.getuid()}"

    @property
    def memory(self) -> Path:
        """Folder in memory for copies of its state, on each host."""
        return Path("/dev/shm", f"unisono-run-{self.key}-{self.command_key}")

    @property
    def address(self) -> str:
        """Name of the socket on which the command that has started the run listens, by whatever path of its folder."""
        return f"unisono-elastic-{replace(self, home=self.home.resolve()).key}"

    @property
    def standby(self) -> str:
        """Name of the socket on which a standby of each host listens."""
        return f"unisono-standby-{self.key}"

    def refusal(self, ranks: int) -> str:
        """Return why so many ranks cannot train its recipe; "" where they can."""
        try:
            if self.recipe is not None:
                check_run(self.recipe, ranks)
        except UsageError as error:
            return str(error)
        return ""

    def kept(self) -> int:
        """Return the newest step that is kept on this host or on the disk; -1 for none."""
        names = [*checkpoint_names(self.memory), *checkpoint_names(self.home / CHECKPOINTS)]
        return max(map(step_of, names), default=-1)

    def store(self) -> bool:
        """Make the newest copy in this host's memory a checkpoint, if it is newer than those. Return True if it was.

        Raises CheckpointError where the disk refuses: the copy is in a folder then that no command removes.
        """
        checkpoints, names = self.home / CHECKPOINTS, checkpoint_names(self.memory)
        if not names:
            return False
        name = checkpoint_name(step_of(names[-1]))
        aside = checkpoints / f".{name}.tmp"
        try:
            if step_of(names[-1]) <= max(map(step_of, checkpoint_names(checkpoints)), default=-1):
                return False
            shutil.copytree(self.memory / names[-1], aside, dirs_exist_ok=True).rename(checkpoints / name)
        except (OSError, CheckpointError) as error:
            shutil.rmtree(aside, ignore_errors=True)
            left = self.memory.rename(self.memory.with_name(f"unisono-state-{self.key}-{self.command_key}"))
            for samples in left.glob("samples-*"):
                samples.unlink(missing_ok=True)
            for older in names[:-1]:
                shutil.rmtree(left / older, ignore_errors=True)
            reason = error.args[0][0][2] if isinstance(error, shutil.Error) else error  # of the first of its files
            raise CheckpointError(
                f"cannot write a checkpoint into {checkpoints}: {reason}; the state is in {left / names[-1]}: free "
                f"space, mkdir -p {checkpoints}, mv {left / names[-1]} {checkpoints}, rm -r {left}, then resume with: "
                f"{self._resumption}"
            ) from error
        return True

    def remedy(self) -> str:
        """Return how it is resumed; "" where it has nothing to begin with."""
        resumable = checkpoint_names(self.home / CHECKPOINTS) or (self.home / RECIPE).exists()
        return f"; resume with: {self._resumption}" if resumable else ""

    @property
    def _resumption(self) -> str:
        name, *arguments = self.later
        if self.recipe is None:  # a program, whose ranks are not told
            arguments = ["--resume", str(self.home), *arguments]
        given = [f"--hosts={','.join(self.hosts)}"] * bool(self.hosts)
        given += [f"--min-ranks={self.least}"] * (self.least > 1)
        if self.ranks and (self.hosts or self.recipe is None):
            given.append(f"--ranks={self.ranks}")
        return shlex.join(["unisono", name, "--elastic", *given, *arguments])

    def kept_anywhere(self) -> int:
        """Return the newest step that is kept on any host, as rank 0 has announced, or on the disk; -1 for none."""
        announced = -1
        with suppress(OSError, ValueError):  # touched only: no copy is whole yet
            announced = int((self.home / ALIVE).read_text())
        with suppress(CheckpointError):  # a disk that is gone: ranks, or `store`, tell of it
            return max(announced, self.kept())
        return max([announced, *map(step_of, checkpoint_names(self.memory))])

    def command(self, ranks: int, hosts: Sequence[str], begun: bool) -> list[str]:
        """Return the command that starts a generation; `begun` is true if one before it has made a step."""
        made = "--resume" not in self.first and (self.home / RECIPE).exists()
        arguments = self.later if begun or made else self.first
        standby = [sys.executable, "-P", "-m", "unisono.elastic.standby", self.standby]
        rank = [sys.executable, "-S", "-E", attach.__file__, self.standby, str(len(standby)), *standby, *arguments]
        names = (MEMORY_VARIABLE, GENERATION_VARIABLE, FOLDER_VARIABLE, *[SURVIVORS_VARIABLE] * self.survives)
        given = [word for name in names for word in ("-x", name)] if hosts and is_open_mpi(self.mpiexec) else []
        return [*self._start(ranks, hosts), *given, *(SURVIVAL if self.survives else ()), *rank]

    def question(self, host: str) -> list[str]:
        """Return the command that ends with 0 where a host starts programs."""
        return [*self._start(1, [host]), "true"]

    @cached_property
    def survives(self) -> bool:
        """True where the launcher lets ranks go on after the death of another."""
        question = [str(self.mpiexec), *SURVIVAL, "-n", "1", "true"]
        return is_open_mpi(self.mpiexec) and not subprocess.run(question, capture_output=True, check=False).returncode

    def _start(self, ranks: int, hosts: Sequence[str]) -> list[str]:
        each, where = math.ceil(ranks / max(1, len(hosts))), list[str]()
        if hosts and is_open_mpi(self.mpiexec):
            where = ["--host", ",".join(f"{host}:{each}" for host in hosts)]
        elif hosts:
            where = ["-hosts", ",".join(hosts), "-ppn", str(each)]
        return [str(self.mpiexec), *where, "-n", str(ranks)]
