"""Elastic runs: `unisono train` and `unisono run` start generations of ranks; `unisono join` adds ranks to one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from unisono.cli.ranks import make_folder, refuse_launcher
from unisono.errors import UsageError
from unisono.rules.asynchronous import has_servers
from unisono.training.recipe import Recipe
from unisono.training.recipe_check import make_rule
from unisono.user_function import is_user_function

ElasticOption = Annotated[
    bool, Option("--elastic", help="Go on when ranks die, are stopped, or join (unisono join), with those there are.")
]
MinRanksOption = Annotated[int, Option(help="Ranks below which an elastic run ends.")]
HostsOption = Annotated[str, Option(help="Hosts of an elastic run, with as many ranks each: a,b,c.")]


def check_elastic(elastic: bool, least: int, hosts: str) -> None:
    """Raise UsageError for options of elastic runs without `elastic`, and for a list of hosts that names none."""
    if not elastic and (hosts or least != 1):
        raise UsageError(f"{f'--hosts {hosts}' if hosts else f'--min-ranks {least}'} needs --elastic")
    if hosts and not hosts.strip(", "):
        raise UsageError(f"--hosts {hosts}: it names no host; give them as in a,b,c")


def run_elastically(
    home: Path,
    first: Sequence[str],
    later: Sequence[str],
    ranks: int,
    least: int,
    hosts: str,
    recipe: Recipe | None = None,
) -> int:
    """Train a recipe, or run a program, with ranks that may die, be stopped or join. Return the exit code.

    `first` are the arguments of the ranks that begin, `later` those of ranks that go on.
    """
    from unisono.elastic.generations import ElasticRun
    from unisono.elastic.supervisor import Supervisor

    if recipe is not None and not is_user_function(recipe.rule.name) and has_servers(make_rule(recipe)):
        raise UsageError(
            f"--elastic: rule {recipe.rule.name!r} has servers, which only Open MPI lets go on after a death"
        )
    fixed = recipe is None or recipe.training.virtual_ranks
    note = "" if fixed else "; without training.virtual_ranks, the numbers depend on how many ranks there are"
    refuse_launcher("--elastic starts the ranks itself, on the hosts of --hosts: call it without a launcher")
    if not 1 <= least <= ranks:
        raise UsageError(f"--min-ranks {least}: it is a number from 1 to {ranks}, the ranks at the start")
    named = [host for host in hosts.split(",") if host]
    supervisor = Supervisor(ElasticRun(home, first, later, least, named, recipe=recipe, ranks=ranks))
    make_folder(home)
    print(f"elastic, into {home}; more ranks: unisono join {home}{' --hosts NAME' * bool(named)}{note}", flush=True)
    return supervisor.play()


def join(
    run: Annotated[Path, Argument(help="Folder of a run that was started with --elastic.")],
    ranks: Annotated[
        int | None, Option("--ranks", "-n", help="Ranks of this machine that join; negative: that leave; default: 1.")
    ] = None,
    hosts: Annotated[str, Option(help="Hosts that join a run with --hosts: c,d.")] = "",
) -> None:
    """Add ranks of this machine to an elastic run, or take some away; or add hosts. All save, and go on at the next
    step.

    A host of the run that comes back is found by itself.
    """
    from unisono.elastic.supervisor import join as ask

    if hosts and ranks is not None:
        raise UsageError(f"--ranks {ranks} and --hosts {hosts}: each host has as many ranks as the others")
    check_elastic(True, 1, hosts)
    named = [*dict.fromkeys(host for host in hosts.split(",") if host)]
    print(f"{run} {ask(run, 1 if ranks is None else ranks, named)}")
