"""`unisono evaluate`, `predict`, `accuracy`, `audit`: a run's newest checkpoint on test data; its curves; its steps."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from unisono.cli.ranks import count_ranks, init_ranks, printer, start_several
from unisono.data.pack import check_installed
from unisono.errors import UsageError
from unisono.launch import cores, keep_memory, local_rank_started, ranks_started
from unisono.training import run_directory
from unisono.training.recipe_check import check_run

if TYPE_CHECKING:
    from unisono.training.scoring.evaluation import Evaluation


def evaluate(
    run: Annotated[Path, Argument(help="Folder of a run.")],
    pack: Annotated[
        Path | None,
        Option(help="Another pack with the same classes or tokens; default: the test set of the run's data."),
    ] = None,
    ranks: Annotated[
        int | None, Option(help="Number of ranks; default: that of the run, but at most one for each core.")
    ] = None,
    throughput: Annotated[
        bool, Option("--throughput", help="Time forward passes on rank 0, at batch sizes 1 to 256.")
    ] = False,
    out: Annotated[Path | None, Option(help="Output folder of the files; default: the run's.")] = None,
    device: Annotated[
        str | None, Option(help="Device of each rank, as compute.device of a recipe; default: that of the run.")
    ] = None,
) -> None:
    """Evaluate the newest checkpoint of a run on a test set.

    Samples of a class: accuracy, loss, recall of each class, confusion. Texts: loss, perplexity and accuracy of tokens,
    and bits per byte where tokens are bytes.

    Starts the ranks; inside mpiexec or srun, this process is one of them. Their number may change last bits of scores.
    """
    recipe = run_directory.past_recipe(run)
    start_several(count_ranks(ranks, min(recipe.ranks, cores())), recipe.training.timeout or None)
    from unisono.device import open_device
    from unisono.training.scoring.evaluate import evaluate as evaluate_on_rank
    from unisono.training.scoring.evaluate import write_files

    open_device(device or recipe.compute.device, local_rank_started(os.environ))
    world = init_ranks(recipe.training.timeout or None)
    log = printer(world)
    with world.agree_on_errors():
        evaluation, facts = evaluate_on_rank(run, world, pack, throughput, log, device)
        files = world.call_on_root(lambda: write_files(evaluation, facts, out or run))
    if world.rank == 0:
        _print(evaluation)
    log("; ".join(filter(None, ("wrote " + " and ".join(map(str, files)), evaluation.remark))))
    world.barrier()  # a rank that is stopped here is still reported; afterwards a launcher ends the others


def _print(evaluation: Evaluation) -> None:
    """Print the measures, and under them the throughput if it was measured."""
    from rich.console import Console
    from rich.table import Table

    console, table = Console(markup=False), Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, text in evaluation.rows():
        table.add_row(name, text)
    console.print(table)
    if evaluation.throughput:
        table = Table(title="forward passes, one rank")
        for head in ("batch", "ms", evaluation.speed_unit):
            table.add_column(head, justify="right")
        for entry in evaluation.throughput:
            table.add_row(f"{entry.batch}", f"{1e3 * entry.seconds:.2f}", f"{evaluation.speed(entry):,.0f}")
        console.print(table)


def predict(
    run: Annotated[Path, Argument(help="Folder of a run.")],
    files: Annotated[list[Path], Argument(help="Files of the kind that the run was trained on: images, audio, texts.")],
    top: Annotated[int, Option(help="Number of classes, or of next tokens, to print.")] = 3,
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
    tokenizer: Annotated[
        str, Option(help="Texts whose tokens are not bytes: the tokenizer.json that they were packed with.")
    ] = "",
    device: Annotated[
        str | None, Option(help="Device as compute.device of a recipe; default: that of the run.")
    ] = None,
) -> None:
    """Print the most probable classes of files, by the newest checkpoint of a run.

    Of texts, print the loss per token, perplexity, bits per byte and the most probable next tokens. A file that cannot
    be read or decoded is reported, and the others are predicted; the exit code is then 1.
    """
    if top < 1:
        raise UsageError(f"--top {top}: print at least 1 class")
    if (started := ranks_started(os.environ) or 1) > 1:
        raise UsageError(f"unisono predict is one process, but {started} ranks are started; start it without mpiexec")
    check_installed()
    keep_memory()
    import torch

    from unisono.device import choose_device
    from unisono.training.recipe import threads_of
    from unisono.training.run import DTYPES, context_of
    from unisono.training.scoring import predict as scoring
    from unisono.training.scoring.evaluate import forward_of, load_network, read_run

    recipe = run_directory.past_recipe(run)
    torch.set_num_threads(threads_of(recipe) or torch.get_num_threads())  # timings are those of so many
    saved = read_run(run)
    for note in saved.notes:
        print(note, file=sys.stderr)
    batch = max(1, recipe.training.batch // recipe.ranks)  # a rank's share in training, which its memory takes
    inputs = scoring.open_inputs(recipe.data, tokenizer, batch)
    place = choose_device(device or recipe.compute.device, 0, 1)
    network = load_network(saved, inputs, place)
    forward = forward_of(network, DTYPES[recipe.model.dtype], context_of(recipe, place), place)
    predictions = list[dict[str, Any]]()
    for file, (line, data) in zip(files, scoring.predict(forward, inputs, files, top), strict=True):
        predictions.append({"file": str(file), **data})
        if "error" in data:
            print(f"unisono: {file}: {line}", file=sys.stderr, flush=True)
        elif not as_json:
            print(f"{file}: {line}", flush=True)
    if as_json:
        print(json.dumps(predictions, indent=1))
    if any("error" in prediction for prediction in predictions):
        raise Exit(1)


def accuracy(
    runs: Annotated[list[Path], Argument(help="Folders of one or more runs.")],
    output: Annotated[
        Path | None,
        Option(help="Output file; its suffix sets the format: svg, png, pdf. Default: accuracy.svg, perplexity.svg."),
    ] = None,
    loss: Annotated[bool, Option("--loss", help="Draw the loss of the test set.")] = False,
) -> None:
    """Draw the test accuracy of runs, top-1 and top-5, against wall-clock time and against epochs.

    Runs on texts have their test perplexity drawn.
    """
    from unisono.training.measures import LOSS, curves_of, draw, summarize
    from unisono.view.chart import write_drawing

    curves = curves_of(runs, LOSS if loss else None)
    for curve in curves:
        print(summarize(curve))
    output = output or Path(f"{curves[0].measure.name}.svg")
    write_drawing(output, lambda form: draw(curves, form=form), "--output")


def audit(
    run: Annotated[Path, Argument(help="Folder of a run that was trained with audit.chain=true.")],
    step: Annotated[int | None, Option(help="Number of the step; default: the last one.")] = None,
    ranks: Annotated[
        int | None,
        Option("--ranks", "-n", help="Number of ranks; default: that of the run, but at most one for each core."),
    ] = None,
) -> None:
    """Recompute a step of a run with virtual ranks, from the nearest checkpoint before it, on any number of ranks.

    Say whether it is the same as it was; if not, what differs first, samples, gradients or weights, of which share. The
    exit code is then 1. The run's folder is not changed.

    Starts the ranks; inside mpiexec or srun, this process is one of them.
    """
    recipe = run_directory.recipe_of(run, [])
    if not recipe.training.virtual_ranks:
        raise UsageError(f"{run} has no virtual ranks: only with them has a step the same bits on any ranks")
    count = count_ranks(ranks, min(recipe.ranks, cores()))
    check_run(recipe, count)
    start_several(count, recipe.training.timeout or None)
    from unisono.training.recompute import recompute

    world = init_ranks(recipe.training.timeout or None)
    with world.agree_on_errors():
        verdict, same = recompute(run, recipe, world, step)
    printer(world)(verdict)
    world.barrier()  # a rank that is stopped here is still reported; afterwards a launcher ends the others
    if not same:
        raise Exit(1)
