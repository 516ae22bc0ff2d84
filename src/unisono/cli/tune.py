"""`unisono tune`: measures the links and writes the machine file whose table `auto` uses."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unisono.cli.ranks import RanksOption, join, printer, start_ranks, write, write_text
from unisono.errors import UsageError


def tune(
    output: Annotated[Path, typer.Option(help="Output file, a machine.")] = Path("unisono-table.toml"),
    ranks: RanksOption = None,
    largest: Annotated[int, typer.Option(help="Largest payload to time, in bytes.")] = 256 << 20,
) -> None:
    """Measure the links, time the schedules, and write a machine file with the table by which "auto" chooses.

    Start it as you will start your program: mpiexec -n 8 -ppn 1 -hosts a,b,... unisono tune. Then name the file in
    UNISONO_TABLE, or in unisono.init(table=...). Given a file of `unisono probe`, it adds the table and keeps the rest.
    """
    if largest < 4:
        raise UsageError(f"--largest {largest}: nothing to time below 4 bytes")
    start_ranks(ranks)
    from unisono.measure.facts import file_of
    from unisono.measure.tune import machine_at
    from unisono.measure.tune import tune as measure

    world = join("tune")
    write(world, output, lambda: output.open("a").close())  # known before anything is measured
    with world.agree_on_errors():
        before = world.call_on_root(lambda: machine_at(output))

    log = printer(world)
    found = measure(world, largest, log, before)
    write_text(world, output, file_of(found))
    log(f"wrote {output}; use it with UNISONO_TABLE={output.resolve()} or unisono.init(table=...)")
