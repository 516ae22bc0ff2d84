"""`unisono tune`: measures the links and writes the table used by `auto`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from unisono.cli.ranks import join, write
from unisono.cli.train import launch
from unisono.errors import UsageError
from unisono.launch import cores, ranks_started


def tune(
    output: Annotated[Path, typer.Option(help="Output file for the table.")] = Path("unisono-table.toml"),
    ranks: Annotated[
        int | None, typer.Option(help="Number of ranks to start on this machine; ignored under mpiexec or srun.")
    ] = None,
    largest: Annotated[int, typer.Option(help="Largest payload to time, in bytes.")] = 256 << 20,
) -> None:
    """Measure the links between the ranks, time the schedules, and write a table by which "auto" chooses.

    Start it as you will start your program: mpiexec -n 8 -ppn 1 -hosts a,b,... unisono tune. Then name the table in
    UNISONO_TABLE, or in unisono.init(table=...).
    """
    if largest < 4:
        raise UsageError(f"--largest {largest}: nothing to time below 4 bytes")
    if ranks_started(os.environ) is None:
        count = ranks or max(2, cores())
        raise typer.Exit(launch(count, ["tune", f"--output={output}", f"--largest={largest}"]))
    from unisono.tuning.tune import hosts_of
    from unisono.tuning.tune import tune as measure
    from unisono.tuning.tune import write as as_text

    world = join("tune")
    write(world, output, lambda: output.open("a").close())  # known before anything is measured

    def log(line: str) -> None:
        if world.rank == 0:
            print(line, flush=True)

    tuned = measure(world, largest, log)
    text = as_text(tuned, hosts_of(world))
    write(world, output, lambda: output.write_text(text))
    log(f"wrote {output}; use it with UNISONO_TABLE={output.resolve()} or unisono.init(table=...)")
