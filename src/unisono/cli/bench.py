"""`unisono bench`: benchmarks of Unisono and its peers."""

from __future__ import annotations

import json
import os
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from unisono.cli.command_group import CommandGroup
from unisono.cli.ranks import join, write
from unisono.cli.train import launch
from unisono.errors import UsageError, install_command
from unisono.lab.plan import parse_rate
from unisono.launch import cores, ranks_started

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, help="Benchmarks of Unisono and its peers.")


@app.command()
def collectives(
    output: Annotated[Path, typer.Option(help="Output folder for results.json, table.md and plot.svg.")] = Path(
        "bench"
    ),
    ranks: Annotated[
        int | None, typer.Option(help="Number of ranks to start on this machine; ignored under mpiexec or srun.")
    ] = None,
    largest: Annotated[int, typer.Option(help="Largest payload in bytes.")] = 64 << 20,
    algorithms: Annotated[
        str | None, typer.Option(help="Algorithms to time, separated by commas; '' for none.")
    ] = None,
    rate: Annotated[str | None, typer.Option(help="Rate of a node's link, for the bound: 200mbit.")] = None,
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
    from unisono.bench import collectives_report
    from unisono.bench.collectives import SIZES, measure

    world = join("bench collectives")
    write(world, output, lambda: output.mkdir(parents=True, exist_ok=True))  # known before anything is measured

    def log(line: str) -> None:
        if world.rank == 0:
            print(line, flush=True)

    found = measure(world, [size for size in SIZES if size <= largest], names, bits, log)
    files = {"results.json": json.dumps(found, indent=1), "table.md": collectives_report.table(found)}
    for name, text in files.items():
        write(world, output, partial((output / name).write_text, text + "\n"))
    drawn = find_spec("matplotlib") is not None
    if drawn:
        write(world, output, lambda: collectives_report.plot(found, output / "plot.svg"))
    log(f"\n{files['table.md']}\n\nwrote {output}/results.json and table.md{' and plot.svg' if drawn else ''}")
    if not drawn:
        log(f"no plot: matplotlib is not installed ({install_command('bench')})")


@app.command()
def networks(
    output: Annotated[Path, typer.Option(help="Output folder for networks.json and networks.md.")] = Path("bench"),
    names: Annotated[
        str, typer.Option(help="Networks, separated by commas.")
    ] = "alexnet,vgg16,vgg19,resnet50,googlenet",
    batch: Annotated[int, typer.Option(help="Batch size.")] = 32,
    steps: Annotated[int, typer.Option(help="Timed steps of each contender.")] = 3,
) -> None:
    """Time training steps of the papers' networks: images/s of Unisono and of stock PyTorch."""
    from unisono.models.user_network import check_name

    if batch < 1 or steps < 1:
        raise UsageError(f"--batch {batch} --steps {steps}: both must be at least 1")
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
    print(f"images/s; {', '.join(f'{key} {value}' for key, value in about.items())}\n\n{table}\n")
    print(f"wrote {output}/networks.json and networks.md")
