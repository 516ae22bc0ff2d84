"""`unisono evaluate`: measures of a run's newest checkpoint on a test set, and its throughput."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unisono.cli.ranks import count_ranks, launch, printer
from unisono.launch import cores, keep_memory, ranks_started
from unisono.training import run_directory

if TYPE_CHECKING:
    from unisono.training.scoring.evaluation import Evaluation


def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    pack: Annotated[
        Path | None,
        typer.Option(help="Another pack with the same classes or tokens; default: the test set of the run's data."),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Number of ranks; default: that of the run, but at most one for each core.")
    ] = None,
    throughput: Annotated[
        bool, typer.Option("--throughput", help="Time forward passes on rank 0, at batch sizes 1 to 256.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Output folder of the files; default: the run's.")] = None,
) -> None:
    """Evaluate the newest checkpoint of a run on a test set.

    Samples of a class: accuracy, loss, recall of each class, confusion. Texts: loss, perplexity and accuracy of tokens,
    and bits per byte where tokens are bytes.

    Starts the ranks; inside mpiexec or srun, this process is one of them. The results do not depend on their number.
    """
    recipe = run_directory.past_recipe(run)
    started, count = ranks_started(os.environ), count_ranks(ranks, min(recipe.ranks, cores()))
    if started is None and count > 1:
        raise typer.Exit(launch(count, recipe.training.timeout or None))
    if started is None:
        keep_memory()
    from unisono.initialize import init
    from unisono.training.scoring.evaluate import evaluate as evaluate_on_rank
    from unisono.training.scoring.evaluate import write_files

    world = init(timeout=recipe.training.timeout or None)
    log = printer(world)
    with world.agree_on_errors():
        found, facts = evaluate_on_rank(run, world, pack, throughput, log)
        target = run if out is None else out
        files = world.call_on_root(lambda: write_files(found, facts, target))
    if world.rank == 0:
        _print(found)
    log("; ".join(filter(None, ("wrote " + " and ".join(map(str, files)), found.remark))))
    world.barrier()  # a rank that is stopped here is still reported; afterwards a launcher ends the others


def _print(found: Evaluation) -> None:
    """Print the measures, and under them the throughput if it was measured."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console, table = Console(), Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in found.rows():
        table.add_row(name, escape(value))
    console.print(table)
    if found.throughput:
        console.print(_throughput_table(found))


def _throughput_table(found: Evaluation) -> object:
    from rich.table import Table

    table = Table(title="forward passes, one rank")
    for head in ("batch", "ms", found.speed_unit):
        table.add_column(head, justify="right")
    for entry in found.throughput:
        table.add_row(f"{entry.batch}", f"{1e3 * entry.seconds:.2f}", f"{found.speed(entry):,.0f}")
    return table
