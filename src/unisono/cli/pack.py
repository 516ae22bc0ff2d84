"""`unisono pack`: packs a data set, or describes a pack."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit, Option

from unisono.errors import PackError, UsageError
from unisono.formats import parse_bytes

if TYPE_CHECKING:
    from unisono.data.pack.packing import PackOptions
    from unisono.data.sources import Splits

MAX_BLACK = 1 / 16
"""Mean of images, of 0 to 1, below which a pack is reported as almost black."""

MAX_LISTED = 10
"""Number of skipped samples that are listed one by one."""


def pack(
    source: Annotated[
        Path | None,
        Argument(
            help="Folders of classes, IDX or CIFAR files, tar shards, Arrow data set, table of paths and labels, "
            "or texts: files, JSON lines, Parquet, an npy file of tokens."
        ),
    ] = None,
    out: Annotated[
        Path | None, Argument(help="Output folder; a data set with splits gets a subfolder for each.")
    ] = None,
    short_side: Annotated[
        int, Option(min=0, help="Short side in pixels to which larger images are reduced; 0: keep all sizes.")
    ] = 256,
    stripes: Annotated[int, Option(min=1, help="Minimum number of stripes (files).")] = 32,
    stripe_size: Annotated[
        str, Option(help="Maximum size of a stripe, in bytes of source data: 256MB, 1GiB.")
    ] = "256MB",
    quality: Annotated[int, Option(min=1, max=100, help="Quality of encoded JPEGs.")] = 90,
    window: Annotated[int, Option(min=1, help="Texts: tokens of a sample, each of which predicts the next.")] = 128,
    tokenizer: Annotated[str, Option(help="Texts: bytes, or a tokenizer.json of Hugging Face's tokenizers.")] = "bytes",
    describe: Annotated[Path | None, Option(help="Folder of a pack to describe, instead of packing.")] = None,
) -> None:
    """Pack a data set into a few large Arrow files, from which training loads it into memory.

    Run it again to resume after a stop. Broken and empty samples, and links in tar files, are skipped and listed; the
    exit code is then 1.
    """
    from unisono.data.pack import check_installed

    check_installed()
    if describe is not None:
        if source is not None:
            raise UsageError("--describe takes no SOURCE")
        from unisono.data.pack.index import describe as lines_of

        for line in lines_of(describe):
            print(line)
        return
    if source is None or out is None:
        raise UsageError("missing SOURCE or OUT: unisono pack SOURCE OUT")
    from unisono.data.kinds.text import TextOptions
    from unisono.data.pack.packing import PackOptions
    from unisono.data.sources import find

    options = PackOptions(short_side, stripes, parse_bytes(stripe_size, "--stripe-size "), quality)
    skipped = _pack(find(source, TextOptions(window, tokenizer)), out, options)
    raise Exit(1 if skipped else 0)


def _pack(parts: Splits, out: Path, options: PackOptions) -> int:
    """Pack all parts of a data set. Return the number of skipped samples."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from unisono.data.kinds import IMAGE, find_kind
    from unisono.data.pack.packing import as_texts, pack
    from unisono.files import locked, naming_os_errors
    from unisono.launch import cores

    total_skipped = 0
    console = Console(markup=False, highlight=False, soft_wrap=True)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    for name, part in parts.items():
        folder = out / name if name else out
        progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        with naming_os_errors(f"cannot create {folder}", PackError):
            folder.mkdir(parents=True, exist_ok=True)
        busy = PackError(f"another process packs into {folder}; wait for it, or name another folder")
        with locked(folder, busy), progress:
            task = progress.add_task(str(folder), total=len(part))
            index = pack(part, folder, options, cores(), partial(progress.advance, task))
        skipped, noun = index.about.skipped, find_kind(part.kind).class_words
        total_skipped += len(skipped)
        console.print(
            f"{folder}: {len(index):,} samples of {len(index.about.classes)} {noun}, {index.nbytes / 1e6:,.1f} MB in "
            f"{len(index.about.stripes)} stripes"
        )
        if part.kind == IMAGE and (mean := max(index.about.mean)) < MAX_BLACK:
            console.print(f"  almost black, mean {mean:.3f}: if they have 10 or 12 bits in 16, scale them to 16 first")
        for key, why in skipped[:MAX_LISTED]:
            console.print(f"  skipped {key}: {why}")
        if part.others:
            (first,) = as_texts(part.others[:1])
            console.print(f"  files of other kinds, left out: {len(part.others):,}, as {first}")
        if empty := [label for label in part.empty if label not in index.about.classes]:
            console.print(f"  folders without samples, so no classes: {', '.join(empty)}")
        if len(skipped) > MAX_LISTED:
            console.print(f"  and {len(skipped) - MAX_LISTED} more: unisono pack --describe {folder}")
    return total_skipped
