"""`unisono train`: starts the ranks, or runs as one of them; `unisono sweep`: a run for each point of a grid."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated

from typer import Argument, Exit, Option

from unisono.cli.elastic import ElasticOption, HostsOption, MinRanksOption, check_elastic, run_elastically
from unisono.cli.ranks import OptionalOutput, count_ranks, init_ranks, launch, refuse_launcher
from unisono.errors import UsageError
from unisono.formats import counted
from unisono.launch import cores, keep_memory, local_rank_started, rank_started, ranks_started
from unisono.rules.asynchronous import has_servers
from unisono.training import run_directory
from unisono.training.recipe import Recipe, differences, find_recipe, names, read_recipe
from unisono.training.recipe_check import check_run, make_rule, survives_deaths
from unisono.training.run_directory import report_if_finished
from unisono.user_function import is_user_function
from unisono.witness import LISTENER_VARIABLE

RecipeArgument = Annotated[
    Path | None, Argument(help="Recipe: a TOML file, or a name such as digits. Not needed with --resume.")
]


def train(
    recipe: RecipeArgument = None,
    ranks: Annotated[int | None, Option("--ranks", "-n", help="Number of ranks; default: that of the recipe.")] = None,
    changes: Annotated[
        list[str] | None, Option("--set", help="Value of a key of the recipe: training.epochs=3. May be repeated.")
    ] = None,
    resume: Annotated[Path | None, Option(help="Folder of a run to resume.")] = None,
    replay: Annotated[
        Path | None, Option(help="Folder of an asynchronous run to replay, bit for bit, into a new run.")
    ] = None,
    run: Annotated[Path | None, Option(help="Folder of the new run; default: a new one under runs/.")] = None,
    timeline: Annotated[
        Path | None,
        Option(help="Output file for a trace of all threads of all ranks and of predicted steps, for ui.perfetto.dev."),
    ] = None,
    machine: Annotated[
        str | None,
        Option(
            envvar="UNISONO_MACHINE",
            help="Machine, or its TOML file, for a prediction of the run before its first step.",
        ),
    ] = None,
    ledger: Annotated[
        Path | None, Option(help="Ledger of predictions and measurements; default: beside the run's folder.")
    ] = None,
    verbose: Annotated[
        bool, Option("--verbose", "-v", help="Show the details that are otherwise in the run's log.txt alone.")
    ] = False,
    elastic: ElasticOption = False,
    min_ranks: MinRanksOption = 1,
    hosts: HostsOption = "",
    memory: Annotated[Path | None, Option(envvar="UNISONO_MEMORY", hidden=True)] = None,
) -> None:
    """Train a network from a recipe. Starts the ranks; inside mpiexec or srun, this process is one of them.

    SIGUSR1, to this command or to any rank, saves a checkpoint at the end of the step. SIGTERM saves one and ends the
    run with exit code 143; --resume continues it. A second SIGTERM ends the run at once.
    """
    OptionalOutput.install()  # the run has its lines in log.txt, too
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # before the first step there is nothing to save
    signal.signal(signal.SIGTERM, _end_before_training)
    check_elastic(elastic, min_ranks, hosts)
    settings, notes = _recipe(recipe, changes or [], resume, run, replay)
    starts, count = ranks_started(os.environ) is None, count_ranks(ranks, settings.ranks)
    check_run(settings, count)
    if machine:
        from unisono.plan.machines import find_machine

        find_machine(machine)  # an unknown one is reported before any rank starts
    if starts and run is not None:
        run_directory.check_unused(run)  # ranks that others have started may already have made it
    if elastic:
        if timeline is not None or replay is not None:
            raise UsageError("--elastic: a run with --timeline or --replay has the same ranks to its end")
        home = resume or run or run_directory.new_folder(settings.name)
        kept = [f"--ledger={ledger}"] * (ledger is not None) + ["--verbose"] * verbose
        first, later = _elastic_arguments(home, recipe, changes or [], resume is not None, machine, kept)
        raise Exit(run_elastically(home, first, later, count, min_ranks, hosts, settings))
    if starts and count == 1:
        keep_memory()  # starts this program anew: before anything is printed
    reports = rank_started(os.environ) == 0 and LISTENER_VARIABLE not in os.environ  # else another process does
    for note in notes if reports else ():
        print(note, flush=True)
    if starts and resume is not None and report_if_finished(resume, settings):
        return
    if reports:
        print(_first_line(settings, count, starts, resume, replay), flush=True)  # long before PyTorch is imported
    if starts and count > 1:
        survives = partial(survives_deaths, settings) if timeline is None else None  # all ranks write it together
        raise Exit(launch(count, settings.training.timeout or None, survives, relays=True))
    from unisono.device import open_device
    from unisono.training.run import TrainOptions
    from unisono.training.run import train as train_on_rank

    open_device(settings.compute.device, local_rank_started(os.environ))
    world = init_ranks(settings.training.timeout or None)
    options = TrainOptions(run, resume, timeline, replay, machine or None, ledger, memory, verbose)
    with world.agree_on_errors():
        code = train_on_rank(settings, world, options)
    world.barrier()  # a rank that is stopped here is still reported; afterwards a launcher ends the others
    if code:
        raise Exit(code)


def _elastic_arguments(
    home: Path, recipe: Path | None, changes: list[str], resumes: bool, machine: str | None, kept: list[str]
) -> tuple[list[str], list[str]]:
    """Return the arguments of the ranks that begin an elastic run in `home`, and of those that go on: both `kept`."""
    given = [str(recipe)] * (recipe is not None) + [f"--set={change}" for change in changes]
    given += [f"--machine={machine}"] * (machine is not None)
    first = ["train", *given, *kept, "--resume" if resumes else "--run", str(home)]
    return first, ["train", *kept, "--resume", str(home)]


def _first_line(recipe: Recipe, count: int, starts: bool, resume: Path | None, replay: Path | None) -> str:
    what = f"resuming {resume}" if resume else f"replaying {replay}" if replay else "training"
    crowd = f", which take turns on {counted(cores(), 'core')}" if starts and count > cores() else ""
    return f"{recipe.name}: {what} on {counted(count, 'rank')}{' of this machine' * starts}{crowd}"


def _recipe(
    path: Path | None, changes: list[str], resume: Path | None, run: Path | None, replay: Path | None
) -> tuple[Recipe, list[str]]:
    """Return the recipe to run, and lines to report. A resumed or replayed run keeps its own recipe."""
    if replay is not None:
        if path is not None or changes or resume is not None:
            raise UsageError("--replay takes the recipe of the run that it replays: no recipe, --set or --resume")
        recipe = run_directory.recipe_of(replay, [])
        if not is_user_function(recipe.rule.name) and not has_servers(make_rule(recipe)):
            raise UsageError(f"--replay {replay}: its rule, {recipe.rule.name}, is synchronous: run its recipe again")
        return recipe, []
    if resume is None:
        if path is None:
            known = ", ".join(names())
            raise UsageError(f"missing recipe: unisono train RECIPE.toml, or --resume RUN; recipes by name: {known}")
        return read_recipe(find_recipe(path), changes), []
    if run is not None:
        raise UsageError("--run names the folder of a new run; a resumed one stays in its own")
    settings = run_directory.recipe_of(resume, changes)
    notes = []
    if path is not None and (keys := differences(read_recipe(find_recipe(path), changes), settings)):
        notes.append(f"the run's own recipe is used; {path} differs from it in {', '.join(keys)}")
    return settings, notes


def _end_before_training(signum: int, _frame: FrameType | None) -> None:
    """End this process by a signal that came before the first step, or after the last."""
    if rank_started(os.environ) == 0:
        message = f"unisono: {signal.Signals(signum).name} before the first step or after the last: nothing is saved"
        print(message, file=sys.stderr, flush=True)
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


def sweep(
    recipe: RecipeArgument = None,
    changes: Annotated[
        list[str] | None,
        Option("--set", help="Key and its values: rule.every=1,4,16. May be repeated; a value has no comma."),
    ] = None,
    ranks: Annotated[int | None, Option(help="Number of ranks of each run; default: that of the recipe.")] = None,
    folder: Annotated[
        Path | None, Option(help="Folder of the sweep; default: sweeps/NAME, with the recipe's name.")
    ] = None,
    resume: Annotated[Path | None, Option(help="Folder of a sweep to resume.")] = None,
) -> None:
    """Train each point of a grid over keys of a recipe, one run after another, and compare the runs.

    Each run has a folder of its own in the sweep's folder. A run that fails does not end the sweep; the exit code is
    then 1. The same command again, or --resume, continues a sweep: runs that have ended are skipped, interrupted runs
    are resumed. SIGTERM and Ctrl-C save the current run and end the sweep with exit code 143 and 130.
    """
    from unisono.training.sweep import grid, run

    refuse_launcher("unisono sweep starts the ranks of each run itself; start it without mpiexec or srun")
    if resume is None:
        if recipe is None:
            raise UsageError("missing recipe: unisono sweep RECIPE --set KEY=a,b, or --resume FOLDER")
        raise Exit(run.run_session(run.plan_given(recipe, changes or [], ranks, folder)))
    if recipe is not None or changes or ranks is not None or folder is not None:
        raise UsageError(f"--resume {resume} takes recipe, grid and ranks from that folder; omit all other arguments")
    raise Exit(run.run_session(grid.open_sweep(resume)[0]))
