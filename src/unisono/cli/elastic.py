"""Elastic runs: `unisono train --elastic` starts generations of ranks; `unisono join` adds ranks to one that runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from unisono.errors import UsageError
from unisono.rules.asynchronous import has_servers
from unisono.training.recipe import Recipe
from unisono.training.recipe_check import make_rule
from unisono.training.run_directory import new_folder
from unisono.user_function import is_user_function


def train_elastically(
    recipe: Recipe, ranks: int, run: Path | None, resume: Path | None, least: int, hosts: Sequence[str]
) -> int:
    """Train a recipe with ranks that may die, be stopped or join. Return the exit code."""
    from unisono.elastic.generations import ElasticRun
    from unisono.elastic.supervisor import Supervisor

    if not is_user_function(recipe.rule.name) and has_servers(make_rule(recipe)):
        raise UsageError(
            f"--elastic: rule {recipe.rule.name!r} has servers, which only Open MPI lets go on after a death"
        )
    if not 1 <= least <= ranks:
        raise UsageError(f"--min-ranks {least}: it is a number from 1 to {ranks}, the ranks at the start")
    home = resume or run or new_folder(recipe.name)
    given = _of_ranks(sys.argv[1:])
    first = given if run or resume else [*given, "--run", str(home)]
    later = ["train", "--resume", str(home), *(["--verbose"] if {"--verbose", "-v"} & {*given} else [])]
    supervisor = Supervisor(ElasticRun(home, first, later, least, hosts), ranks)
    print(f"{recipe.name}: elastic, into {home}; more ranks: unisono join {home}", flush=True)
    if not recipe.training.virtual_ranks:
        print("the numbers depend on how many ranks there are at each step; training.virtual_ranks makes them the same")
    return supervisor.play()


def _of_ranks(arguments: Sequence[str]) -> list[str]:
    """Return a command's arguments without those that say where ranks are."""
    kept, skip = list[str](), False
    for argument in arguments:
        name, _, value = argument.partition("=")
        if skip or name in ("--ranks", "-n", "--min-ranks", "--hosts"):
            skip = not skip and not value
        elif name != "--elastic":
            kept.append(argument)
    return kept


def join(
    run: Annotated[Path, typer.Argument(help="Folder of a run that was started with train --elastic.")],
    ranks: Annotated[
        int, typer.Option("--ranks", "-n", help="Ranks of this machine that join; a negative number: that leave.")
    ] = 1,
) -> None:
    """Add ranks of this machine to an elastic run, or take some away: all save, and go on at the next step.

    A host of --hosts that comes back is found by itself.
    """
    from unisono.elastic.supervisor import join as ask

    ask(run, ranks)
    print(f"{run}: asked for {ranks:+d} rank{'s' * (abs(ranks) > 1)}")
