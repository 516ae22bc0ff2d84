"""`unisono data`: statistics of packed data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Statistics of packed data.")


@app.callback()
def _commands() -> None:
    """Make the functions commands, even where there is only one: Typer needs a callback for that."""


@app.command()
def quality(
    pack: Annotated[Path, typer.Argument(help="Folder of a pack.")],
    epoch: Annotated[int, typer.Option(min=0, help="Epoch whose order is measured.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the run.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Samples of a step, of the streamed order.")] = 128,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks that share a step of the streamed order.")] = 1,
    buffer_megabytes: Annotated[int, typer.Option(min=1, help="Shuffle buffer of the streamed order.")] = 1024,
) -> None:
    """Show the quality of the shuffle: an epoch's order, in memory and streamed, compared with true permutations."""
    from unisono.data.requirements import check_installed

    check_installed()
    import numpy as np
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from unisono.data.order import epoch_rng, permutation
    from unisono.data.pack.index import read_index
    from unisono.data.quality import PERMUTATIONS, Quality, compare_with_permutations, shuffle_shares
    from unisono.data.quality import quality as measure
    from unisono.data.storage.streamed_order import blocks_of_pack, streamed_order

    index = read_index(pack)
    found = compare_with_permutations(permutation(len(index), seed, epoch), index.label)
    table = Table(title=f"{escape(str(pack))}: the order of epoch {epoch}, and {PERMUTATIONS} true permutations")
    for head in ("", "epoch", "true permutation", "as packed", "streamed"):
        table.add_column(head, justify="right" if head else "left")
    packed = measure(np.arange(len(index)), index.label)
    order = streamed_order(blocks_of_pack(index), batch, buffer_megabytes << 20, epoch_rng(seed, epoch))
    streamed = compare_with_permutations(shuffle_shares(order, batch, ranks), index.label)
    words = ("neighbours of one class", "neighbours that stayed neighbours", "distance moved")
    for name, row in zip(Quality._fields, words, strict=True):
        true = f"{getattr(found.mean, name):.5f} ± {getattr(found.std, name):.5f}"
        in_memory, before, read = (f"{getattr(each, name):.5f}" for each in (found.found, packed, streamed.found))
        table.add_row(row, in_memory, true, before, read)
    Console().print(table)
    print(f"at most {found.max_z_score:.1f} standard deviations from a true permutation")
    print(f"streamed: at most {streamed.max_z_score:.1f}, for steps of {batch} samples on {ranks} ranks")
