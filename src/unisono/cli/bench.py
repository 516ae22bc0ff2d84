"""`unisono bench`: benchmarks of Unisono beside its peers."""

from __future__ import annotations

import json
import os
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from unisono.cli.ranks import join, write
from unisono.cli.train import launch
from unisono.errors import UsageError
from unisono.lab.plan import parse_rate
from unisono.launch import cores, ranks_started

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Measure what is here beside its peers.")


@app.command()
def collectives(
    output: Annotated[Path, typer.Option(help="The folder for results.json, table.md and plot.svg.")] = Path("bench"),
    ranks: Annotated[int | None, typer.Option(help="Ranks to start on this machine, if no launcher did.")] = None,
    largest: Annotated[int, typer.Option(help="The largest payload, in bytes.")] = 64 << 20,
    algorithms: Annotated[str | None, typer.Option(help="Only these, with commas between; '' for none.")] = None,
    rate: Annotated[str | None, typer.Option(help="What a node's link carries, for the bound: 200mbit.")] = None,
) -> None:
    """Time the allreduce: every algorithm, the MPI library, gloo and the bound, in one run."""
    from unisono.schedules import check
    from unisono.wires import WIRES

    if largest < 4:
        raise UsageError(f"--largest {largest}: nothing to time below 4 bytes")
    names = None if algorithms is None else [name for name in algorithms.split(",") if name]
    for name in names or []:
        schedule, _, wire = name.partition(" ")
        if schedule not in ("auto", "library"):
            check(schedule)
        if wire and wire not in WIRES:
            raise UsageError(f"--algorithms {name}: there is no wire {wire!r}; there are {', '.join(WIRES)}")
    bits = parse_rate(rate) if rate else None
    if ranks_started(os.environ) is None:
        chosen = [] if algorithms is None else [f"--algorithms={algorithms}"]
        given = [f"--output={output}", f"--largest={largest}", *chosen, *([f"--rate={rate}"] if rate else [])]
        raise typer.Exit(launch(ranks or max(2, cores()), ["bench", "collectives", *given]))
    from unisono.bench import report
    from unisono.bench.collectives import SIZES, measure

    world = join("bench collectives")
    write(world, output, lambda: output.mkdir(parents=True, exist_ok=True))  # known before anything is measured

    def say(words: str) -> None:
        if world.rank == 0:
            print(words, flush=True)

    found = measure(world, [size for size in SIZES if size <= largest], names, bits, say)
    files = {"results.json": json.dumps(found, indent=1), "table.md": report.table(found)}
    for name, text in files.items():
        write(world, output, partial((output / name).write_text, text + "\n"))
    drawn = find_spec("matplotlib") is not None
    if drawn:
        write(world, output, lambda: report.plot(found, output / "plot.svg"))
    say(f"\n{report.table(found)}\n\nwrote {output}/results.json and table.md{' and plot.svg' if drawn else ''}")
    if not drawn:
        say("no plot: it needs matplotlib (pip install 'unisono[bench]')")


@app.command()
def networks(
    output: Annotated[Path, typer.Option(help="The folder for networks.json and networks.md.")] = Path("bench"),
    names: Annotated[str, typer.Option(help="These, with commas between.")] = "alexnet,vgg16,vgg19,resnet50,googlenet",
    batch: Annotated[int, typer.Option(help="Pictures of a step.")] = 32,
    steps: Annotated[int, typer.Option(help="Steps that are timed of each.")] = 3,
) -> None:
    """Time training steps of the papers' networks: images a second, ours beside stock PyTorch."""
    from unisono.models.own import check_name

    if batch < 1 or steps < 1:
        raise UsageError(f"--batch {batch} --steps {steps}: at least 1 of each")
    chosen = [name for name in names.split(",") if name]
    for name in chosen:
        check_name(name)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror}") from error
    import torch
    from rich.console import Console

    from unisono.bench.networks import as_markdown, measure_networks
    from unisono.compute.convolution_plan import ConvolutionPlan
    from unisono.compute.processor import processor

    console, plan = Console(stderr=True), ConvolutionPlan()
    with console.status("") as status:
        found = measure_networks(chosen, batch, steps, plan, status.update)
    about = {"processor": processor().name, "threads": torch.get_num_threads(), "torch": torch.__version__}
    table = as_markdown(found)
    whole = {**about, "networks": found, "plan": plan.measured}
    (output / "networks.json").write_text(json.dumps(whole, indent=1) + "\n")
    (output / "networks.md").write_text(table + "\n")
    print(f"pictures a second; {', '.join(f'{key} {value}' for key, value in about.items())}\n\n{table}\n")
    print(f"wrote {output}/networks.json and networks.md")
