"""`unisono bench`: what is here, beside its peers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

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

    if largest < 4:
        raise UsageError(f"--largest {largest}: nothing to time below 4 bytes")
    names = None if algorithms is None else [name for name in algorithms.split(",") if name]
    for name in names or []:
        if name.split(" ", maxsplit=1)[0] not in ("auto", "library", "hierarchical/library"):
            check(name.split(" ", maxsplit=1)[0])
    bits = parse_rate(rate) if rate else None
    if ranks_started(os.environ) is None:
        chosen = [] if algorithms is None else [f"--algorithms={algorithms}"]
        given = [f"--output={output}", f"--largest={largest}", *chosen, *([f"--rate={rate}"] if rate else [])]
        raise typer.Exit(launch(ranks or max(2, cores()), ["bench", "collectives", *given]))
    from unisono.bench import report
    from unisono.bench.collectives import SIZES, measure
    from unisono.world import init

    world = init()
    if world.size == 1:
        raise UsageError("one rank has nobody to exchange with; start several: mpiexec -n 4 unisono bench collectives")

    def say(words: str) -> None:
        if world.rank == 0:
            print(words, flush=True)

    found = measure(world, [size for size in SIZES if size <= largest], names, bits, say)

    def write() -> None:
        output.mkdir(parents=True, exist_ok=True)
        (output / "results.json").write_text(json.dumps(found, indent=1) + "\n")
        (output / "table.md").write_text(report.table(found) + "\n")
        report.plot(found, output / "plot.svg")

    world.on_root(write)
    say(f"\n{report.table(found)}\n\nwrote {output}/results.json, table.md and plot.svg")
