"""`unisono bench`: what is here, beside its peers."""

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
    from unisono.training.recipe import WIRES

    if largest < 4:
        raise UsageError(f"--largest {largest}: nothing to time below 4 bytes")
    names = None if algorithms is None else [name for name in algorithms.split(",") if name]
    for name in names or []:
        schedule, _, wire = name.partition(" ")
        if schedule not in ("auto", "library", "hierarchical/library"):
            check(schedule)
        if wire and wire not in WIRES:
            raise UsageError(f"--algorithms {name}: there is no wire {wire!r}; there are {', '.join(WIRES[1:])}")
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
