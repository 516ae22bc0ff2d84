"""`unisono predict`: classes of files, by a run's newest checkpoint."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unisono.data.requirements import check_installed
from unisono.errors import UsageError
from unisono.launch import keep_memory, ranks_started

if TYPE_CHECKING:
    from unisono.training.scoring.predict import FilePrediction


def predict(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    files: Annotated[list[Path], typer.Argument(help="Files of the kind that the run was trained on: images, audio.")],
    top: Annotated[int, typer.Option(help="Number of classes to print.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the most probable classes of files, by the newest checkpoint of a run.

    A file that cannot be read or decoded is reported, and the others are predicted; the exit code is then 1.
    """
    if top < 1:
        raise UsageError(f"--top {top}: print at least 1 class")
    if (started := ranks_started(os.environ) or 1) > 1:
        raise UsageError(f"unisono predict is one process, but {started} ranks are started; start it without mpiexec")
    check_installed()
    keep_memory()
    from unisono.training.build import DTYPES, context_of
    from unisono.training.scoring.file_inputs import open_file_inputs
    from unisono.training.scoring.predict import predict as predict_files
    from unisono.training.scoring.saved_run import load_network, read_run

    saved = read_run(run)
    for note in saved.notes:
        print(note, file=sys.stderr)
    inputs = open_file_inputs(saved.recipe.data)
    network = load_network(saved, inputs)
    dtype, within = DTYPES[saved.recipe.model.dtype], context_of(saved.recipe)
    found: list[FilePrediction] = []
    for one in predict_files(network, inputs, files, top, dtype, within):
        found.append(one)
        if one.error:
            print(f"unisono: {one.file}: {one.error}", file=sys.stderr, flush=True)
        elif not as_json:
            words = "  ".join(f"{name} {probability:.2%}" for name, probability in one.classes)
            print(f"{one.file}: {words}", flush=True)
    if as_json:
        print(json.dumps([_data(one) for one in found], indent=1))
    if any(one.error for one in found):
        raise typer.Exit(1)


def _data(one: FilePrediction) -> dict[str, Any]:
    """Return a prediction as data for JSON."""
    if one.error:
        return {"file": str(one.file), "error": one.error}
    return {"file": str(one.file), "classes": [{"class": name, "probability": share} for name, share in one.classes]}
