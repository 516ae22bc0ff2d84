"""`unisono layers`: time of each layer of a network, and its lower bound."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unisono.cli.ranks import make_folder
from unisono.errors import UsageError
from unisono.launch import keep_memory
from unisono.models import check_name, input_shape

if TYPE_CHECKING:
    from rich.console import Console

    from unisono.bench.layers import LayerTiming, Peak

PLAIN_WIDTH = 140
"""Columns of the table when the output is not a terminal."""


def layers(
    model: Annotated[str, typer.Option(help="Name of a network, as in a recipe, or module:function.")] = "resnet50",
    batch: Annotated[int, typer.Option(help="Batch size.")] = 32,
    size: Annotated[
        int, typer.Option(help="Width and height of the images in pixels; 0: as in the network's paper.")
    ] = 0,
    classes: Annotated[int, typer.Option(help="Number of classes.")] = 1000,
    output: Annotated[
        Path | None, typer.Option(help="Output folder for layers.json, and layers.svg if matplotlib is installed.")
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="File of a convolution plan, read and extended.")] = None,
    precision: Annotated[
        str, typer.Option(help="float32, bfloat16, or auto: bfloat16 if the processor supports it.")
    ] = "auto",
) -> None:
    """Time each layer's three passes, each by its fastest algorithm, and compare them with measured bounds."""
    if batch < 1:
        raise UsageError(f"--batch {batch}: the batch size must be at least 1")
    check_name(model)
    if output is not None:
        make_folder(output)
    keep_memory()
    import torch
    from rich.console import Console

    from unisono.bench.layers import layers_of, measure_layers, measure_peak
    from unisono.compute.convolution_plan import ConvolutionPlan, check_plan, machine, read_plan, write_plan
    from unisono.compute.prepare import check_precision, choose_dtype
    from unisono.compute.response_norm import use_response_norms
    from unisono.models import make_network
    from unisono.processor import processor

    check_precision(precision)
    if plan is not None:
        check_plan(plan)
    here, dtype = processor(), choose_dtype(precision, torch.float32, "cpu", processor())
    shape = (batch, *input_shape(model, size))
    wide = None if sys.stdout.isatty() else PLAIN_WIDTH
    console = Console(highlight=False, soft_wrap=True, width=wide)
    known = {} if plan is None else read_plan(plan, machine(here.name))
    timings = ConvolutionPlan(known)
    network = make_network(model, "", classes, shape[1])
    use_response_norms(network)
    found = layers_of(network, shape)
    peak = measure_peak(dtype)
    with console.status("") as status:
        rows = measure_layers(found, timings, dtype, status.update)
    if plan is not None:
        write_plan(plan, machine(here.name), timings.measured)
    about = {
        "model": model,
        "inputs": shape,
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "processor": here.name,
    }
    _print(console, rows, peak, about)
    if output is not None:
        _write(console, rows, peak, about, output)


def _print(console: Console, rows: Sequence[LayerTiming], peak: Peak, about: Mapping[str, Any]) -> None:
    """Print a table of the layers, and sums of it."""
    from unisono.bench.layers import as_table, medians, sums

    console.print(as_table(rows, peak))
    whole = sum(row.seconds for row in rows)
    for name, seconds in sums(rows):
        console.print(f"{name:34}{1e3 * seconds:10.1f} ms{seconds / whole:8.1%}", markup=False)
    console.print(
        f"\n{about['model']}, {' x '.join(map(str, about['inputs']))}, {about['dtype']}, {about['threads']} threads on "
        f"{about['processor']}: "
        f"{1e3 * whole:.0f} ms in these layers, without biases and the operations between layers\n"
        f"peak: {peak.operations_per_second / 1e9:.0f} GFLOP/s of products, "
        f"{peak.bytes_per_second / 1e9:.1f} GB/s of memory; median convolution at "
        + ", ".join(f"{share:.0%} of its bound ({which})" for which, share in medians(rows, peak).items()),
        markup=False,
    )


def _write(console: Console, rows: Sequence[LayerTiming], peak: Peak, about: Mapping[str, Any], output: Path) -> None:
    """Write the table as data, and as a chart where matplotlib is installed."""
    from unisono.bench.layers import as_data, draw
    from unisono.view.chart import no_pictures

    (output / "layers.json").write_text(json.dumps(as_data(rows, peak, about), indent=1) + "\n")
    if not (missing := no_pictures()):
        title = f"{about['model']}, batch {about['inputs'][0]}, {about['dtype']}"
        (output / "layers.svg").write_bytes(draw(rows, peak, title))
    console.print(f"wrote {output}/layers.json{f'; {missing}' if missing else ' and layers.svg'}", markup=False)
