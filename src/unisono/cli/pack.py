"""`unisono pack`: makes a pack of a data set, or describes a pack."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from unisono.errors import UsageError

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
TOLD = 10
"""Number of skipped samples that are listed one by one."""


def pack(
    source: Annotated[
        Path | None,
        typer.Argument(
            help="Folders of classes, IDX or CIFAR files, tar shards, an Arrow data set, a table of paths and labels."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Argument(help="The folder of the pack; a data set in parts gets one each.")
    ] = None,
    short_side: Annotated[
        int, typer.Option(min=0, help="Pictures with a longer short side are made so large; 0: none is.")
    ] = 256,
    stripes: Annotated[int, typer.Option(min=1, help="Files at least.")] = 32,
    stripe_size: Annotated[
        str, typer.Option(help="Bytes of a file at most, as the samples are found: 256MB, 1GiB.")
    ] = "256MB",
    quality: Annotated[int, typer.Option(min=1, max=100, help="Of the JPEGs that are made.")] = 90,
    describe: Annotated[Path | None, typer.Option(help="Tell what this pack holds, and make none.")] = None,
) -> None:
    """Pack a data set into few big files that train from memory; they open in pyarrow, pandas, polars and datasets.

    Run it again to resume after a stop. Broken and empty samples are skipped and listed; the exit code is then 1.
    """
    if describe is not None:
        if source is not None:
            raise UsageError("--describe tells what a pack holds; it makes none of a SOURCE")
        from unisono.data.pack.describing import describe as tell

        for line in tell(describe):
            print(line)
        return
    if source is None or out is None:
        raise UsageError("what is to be packed where? unisono pack SOURCE OUT")
    from unisono.data.pack.packing import Way

    left_out = _pack(source, out, Way(short_side, stripes, nbytes_of(stripe_size), quality))
    raise typer.Exit(1 if left_out else 0)


def _pack(source: Path, out: Path, way: object) -> int:
    """Pack all parts of a source. Return the number of skipped samples."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from unisono.data.pack.packing import Way, pack
    from unisono.data.sources import find
    from unisono.launch import cores

    assert isinstance(way, Way)
    left_out = 0
    console = Console(highlight=False, soft_wrap=True)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    for name, part in find(source).items():
        folder = out / name if name else out
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task(str(folder), total=len(part))
            index = pack(part, folder, way, cores(), lambda: progress.advance(task))  # noqa: B023  called in the turn
        skipped = index.about.skipped
        left_out += len(skipped)
        console.print(
            f"{folder}: {len(index):,} samples of {len(index.about.classes)} classes, {index.nbytes / 1e6:,.1f} MB in "
            f"{len(index.about.stripes)} stripes",
            markup=False,
        )
        for key, why in skipped[:TOLD]:
            console.print(f"  left out {key}: {why}", markup=False)
        if len(skipped) > TOLD:
            console.print(f"  and {len(skipped) - TOLD} more: unisono pack --describe {folder}", markup=False)
    return left_out


def nbytes_of(text: str) -> int:
    """Return the bytes in words like 256MB or 1GiB. Raises UsageError."""
    found = re.fullmatch(r"\s*(\d+)\s*([a-zA-Z]*)\s*", text)
    unit = UNITS.get(found[2].upper()) if found else None
    if not found or unit is None or int(found[1]) * unit < 1:
        raise UsageError(f"--stripe-size {text}: not a size like 256MB or 1GiB")
    return int(found[1]) * unit
