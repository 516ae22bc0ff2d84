"""`unisono train`: starts the ranks, or runs as one of them."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Annotated, Any, Self

import typer

from unisono.errors import LaunchError, UsageError
from unisono.launch import (
    find_mpiexec,
    keep_memory,
    launch_command,
    launch_environment,
    rank_started,
    ranks_started,
    survival_options,
)
from unisono.rules.asynchronous import has_servers
from unisono.startup import Startup
from unisono.timeouts import timeout_of
from unisono.training import run_directory
from unisono.training.named_rule import make_rule, survives_deaths
from unisono.training.recipe import Recipe, differences
from unisono.training.recipe_check import check_run
from unisono.training.recipe_file import find_recipe, read_recipe
from unisono.training.run_directory import report_if_finished
from unisono.user_function import is_user_function
from unisono.witness import LISTENER_VARIABLE, Listener

ERASE = "\x1b[K"
"""Control code that erases a terminal's line from the cursor to its end."""


class StartSign:
    """Seconds since the ranks were started, in a terminal's last line; elsewhere nothing.

    The cursor stays at the beginning of that line, so what a rank prints replaces it.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks, self._begun = ranks, time.monotonic()
        self._shown, self._active = -1, sys.stdout.isatty()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()

    def show(self) -> None:
        """Show the seconds if they have changed."""
        seconds = int(time.monotonic() - self._begun)
        if self._active and seconds != self._shown:
            self._shown = seconds
            words = f"starting {self._ranks} rank{'s' * (self._ranks > 1)}: {seconds} s"
            print(words, end="\r", flush=True)

    def clear(self) -> None:
        """Erase the sign, for good."""
        if self._shown >= 0:
            print(ERASE, end="", flush=True)
        self._shown, self._active = -1, False


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Signals that request the end of a run."""

INTERRUPT_GRACE_SECONDS = 3.0
"""Seconds that mpiexec has to end after Ctrl-C in a terminal, before SIGINT is sent to it."""


def train(
    recipe: Annotated[
        Path | None, typer.Argument(help="Recipe: a TOML file, or a name such as digits. Not needed with --resume.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", "-n", help="Number of ranks; default: that of the recipe.")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="Value of a key of the recipe: training.epochs=3. May be repeated."),
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Folder of a run to resume.")] = None,
    replay: Annotated[
        Path | None, typer.Option(help="Folder of an asynchronous run to replay, bit for bit, into a new run.")
    ] = None,
    run: Annotated[Path | None, typer.Option(help="Folder of the new run; default: a new one under runs/.")] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            help="Output file for a trace of all threads of all ranks and of predicted steps, for ui.perfetto.dev."
        ),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(
            envvar="UNISONO_MACHINE",
            help="Machine, or its TOML file, for a prediction of the run before its first step.",
        ),
    ] = None,
    ledger: Annotated[
        Path | None, typer.Option(help="Ledger of predictions and measurements; default: beside the run's folder.")
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show the details that are otherwise in the run's log.txt alone.")
    ] = False,
) -> None:
    """Train a network from a recipe. Starts the ranks; inside mpiexec or srun, this process is one of them.

    SIGUSR1, to this command or to any rank, saves a checkpoint at the end of the step. SIGTERM saves one and ends the
    run with exit code 143; --resume continues it. A second SIGTERM ends the run at once.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # before the first step there is nothing to save
    signal.signal(signal.SIGTERM, _end_before_training)
    changes = changes or []
    settings, notes = _recipe(recipe, changes, resume, run, replay)
    started = ranks_started(os.environ)
    count = _count(ranks, started, settings)
    check_run(settings, count)
    if machine:
        from unisono.plan.machines import find_machine

        find_machine(machine)  # an unknown one is reported before any rank starts
    if started is None and run is not None:
        run_directory.check_unused(run)  # ranks that others have started may already have made it
    if started is None and count == 1:
        keep_memory()  # starts this program anew: before anything is printed
    reports = rank_started(os.environ) == 0 and LISTENER_VARIABLE not in os.environ  # else another process does
    if reports:
        _print(notes)
    if started is None and resume is not None and report_if_finished(resume, settings):
        return
    if reports:
        what = f"resuming {resume}" if resume else f"replaying {replay}" if replay else "training"
        where = f"{count} rank{'s' * (count > 1)}{' of this machine' * (started is None)}"
        _print([f"{settings.name}: {what} on {where}"])  # long before PyTorch is imported
    if started is None and count > 1:
        paths = {"resume": resume, "replay": replay, "run": run, "timeline": timeline, "ledger": ledger}
        arguments = _arguments(recipe, changes, {**paths, "machine": machine}, verbose)
        survives = partial(survives_deaths, settings) if timeline is None else None  # all ranks write it together
        raise typer.Exit(launch(count, arguments, settings.training.timeout or None, survives))
    paths = {"folder": run, "resume": resume, "trace": timeline, "replay": replay, "ledger": ledger}
    _run_as_rank(settings, machine=machine or None, verbose=verbose, **paths)


def _count(ranks: int | None, started: int | None, settings: Recipe) -> int:
    """Return the number of ranks: as the launcher has `started`, as given, or the recipe's. Raises LaunchError."""
    if ranks is not None and ranks < 1:
        raise LaunchError(f"--ranks {ranks}: the number of ranks must be at least 1")
    if started is not None and ranks is not None and started != ranks:
        raise LaunchError(f"--ranks {ranks}, but the launcher has started {started}; omit --ranks")
    return started or ranks or settings.ranks


def _arguments(
    recipe: Path | None, changes: Sequence[str], options: Mapping[str, Path | str | None], verbose: bool = False
) -> list[str]:
    """Return the arguments of `unisono` on each rank."""
    given = [f"--{name}={value}" for name, value in options.items() if value]
    given += ["--verbose"] if verbose else []
    return ["train", *([str(recipe)] if recipe else []), *(f"--set={change}" for change in changes), *given]


def _recipe(
    path: Path | None, changes: list[str], resume: Path | None, run: Path | None, replay: Path | None
) -> tuple[Recipe, list[str]]:
    """Return the recipe to run, and lines to report. A resumed or replayed run keeps its own recipe."""
    if replay is not None:
        if path is not None or changes or resume is not None:
            raise UsageError("--replay takes the recipe of the run that it replays: no recipe, --set or --resume")
        found = run_directory.recipe_of(replay, [])
        if not is_user_function(found.rule.name) and not has_servers(make_rule(found)):
            raise UsageError(f"--replay {replay}: its rule, {found.rule.name}, is synchronous: run its recipe again")
        return found, []
    if resume is None:
        if path is None:
            raise UsageError("missing recipe: unisono train RECIPE.toml, or --resume RUN")
        return read_recipe(find_recipe(path), changes), []
    if run is not None:
        raise UsageError("--run names the folder of a new run; a resumed one stays in its own")
    settings = run_directory.recipe_of(resume, changes)
    notes = []
    if path is not None and (keys := differences(read_recipe(find_recipe(path), changes), settings)):
        notes.append(f"the run's own recipe is used; {path} differs from it in {', '.join(keys)}")
    return settings, notes


def _print(notes: list[str]) -> None:
    for note in notes:
        print(note, flush=True)


def launch(
    ranks: int, arguments: list[str], timeout: float | None = None, survives: Callable[[], bool] | None = None
) -> int:
    """Run this command on `ranks` ranks. Return the exit code. Signals sent to this process alone are passed on.

    `survives` returns True where the others are to go on after a rank has died; it is asked if the launcher can do that
    (Open MPI's).

    `timeout`, in seconds as `timeouts.py` defines it, limits the wait for a rank that is stopped during the start.
    """
    mpiexec, limit = find_mpiexec(), timeout_of(timeout)
    options = () if survives is None else survival_options(mpiexec)
    if options and survives is not None and not survives():
        options = ()
    command = launch_command(mpiexec, ranks, arguments, options)
    environment = launch_environment(os.environ, sys.stdout.isatty())
    received: list[int] = []
    started: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        for process in started:
            process.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGUSR1, pass_on)
    with (
        closing(Listener()) as listener,
        subprocess.Popen(command, env={**environment, LISTENER_VARIABLE: listener.address}) as process,
    ):
        started.append(process)
        for early in received:
            process.send_signal(early)
        startup = Startup(process.pid, ranks, limit)
        with StartSign(ranks) as sign:
            code = _wait(process, received, startup, sign)
        code = startup.finish(any(number in STOP_SIGNALS for number in received), code, listener, bool(options))
    return exit_code(code, received)


def _wait(process: subprocess.Popen[bytes], received: list[int], startup: Startup, sign: StartSign) -> int:
    """Wait for mpiexec to end. It gets a terminal's Ctrl-C as well; a SIGINT sent only to this process is passed on."""
    until = math.inf
    while True:
        try:
            if not startup.active:
                sign.clear()
                return process.wait(None if until == math.inf else max(0.0, until - time.monotonic()))
            sign.show()
            startup.poll()
            if (code := process.poll()) is not None:
                return code
        except KeyboardInterrupt:
            received.append(signal.SIGINT)
            until = time.monotonic() + INTERRUPT_GRACE_SECONDS
        except subprocess.TimeoutExpired:
            pass
        if time.monotonic() >= until:
            process.send_signal(signal.SIGINT)
            until = math.inf


def exit_code(code: int, received: Sequence[int]) -> int:
    """Return the exit code, given mpiexec's `code` and the signals that this process received.

    0 and 2 come from the ranks: they had finished before, or something failed, such as a checkpoint. Otherwise the code
    is that of the signal that ended them, however mpiexec reports it.
    """
    ending = [number for number in received if number in STOP_SIGNALS]
    if ending and code not in (0, 2):
        return 128 + ending[0]
    return code if code >= 0 else 128 - code


def _end_before_training(number: int, _frame: FrameType | None) -> None:
    """End this process by a signal that came before the first step, or after the last."""
    if rank_started(os.environ) == 0:
        words = f"unisono: {signal.Signals(number).name} before the first step or after the last: nothing is saved"
        print(words, file=sys.stderr, flush=True)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _run_as_rank(settings: Recipe, **options: Any) -> None:
    """Run as one of the ranks; `options` are those of `TrainOptions`."""
    from unisono.initialize import init
    from unisono.training.run import TrainOptions
    from unisono.training.run import train as train_on_rank

    world = init(timeout=settings.training.timeout or None)
    with world.agree_on_errors():
        code = train_on_rank(settings, world, TrainOptions(**options))
    world.barrier()  # a rank that is stopped here is still reported; afterwards a launcher ends the others
    if code:
        raise typer.Exit(code)
