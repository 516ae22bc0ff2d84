"""`unisono predict`: classes of files, or scores of texts, by a run's newest checkpoint."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unisono.data.pack.layout import check_installed
from unisono.errors import UsageError
from unisono.launch import keep_memory, ranks_started

if TYPE_CHECKING:
    from unisono.training.scoring.predict import FilePrediction


def predict(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    files: Annotated[
        list[Path], typer.Argument(help="Files of the kind that the run was trained on: images, audio, texts.")
    ],
    top: Annotated[int, typer.Option(help="Number of classes, or of next tokens, to print.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    tokenizer: Annotated[
        str, typer.Option(help="Texts whose tokens are not bytes: the tokenizer.json that they were packed with.")
    ] = "",
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
    from unisono.training.build import DTYPES, context_of
    from unisono.training.scoring.evaluate import forward_of
    from unisono.training.scoring.file_inputs import open_inputs
    from unisono.training.scoring.predict import PredictOptions
    from unisono.training.scoring.predict import predict as predict_files
    from unisono.training.scoring.saved_run import load_network, read_run

    saved = read_run(run)
    for note in saved.notes:
        print(note, file=sys.stderr)
    recipe = saved.recipe
    inputs = open_inputs(recipe.data, tokenizer)
    network = load_network(saved, inputs)
    batch = max(1, recipe.training.batch // recipe.ranks)  # a rank's share in training, which its memory takes
    forward = forward_of(network, DTYPES[recipe.model.dtype], context_of(recipe))
    found: list[FilePrediction] = []
    for one in predict_files(forward, inputs, files, PredictOptions(top, batch)):
        found.append(one)
        if one.prediction is None:
            print(f"unisono: {one.file}: {one.error}", file=sys.stderr, flush=True)
        elif not as_json:
            print(f"{one.file}: {one.prediction.words}", flush=True)
    if as_json:
        print(json.dumps([_data(one) for one in found], indent=1))
    if any(one.prediction is None for one in found):
        raise typer.Exit(1)


def _data(one: FilePrediction) -> dict[str, Any]:
    """Return a prediction as data for JSON."""
    return {"file": str(one.file), **({"error": one.error} if one.prediction is None else one.prediction.data)}
