"""`unisono data`: statistics of packed data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unisono.cli.command_group import CommandGroup

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, help="Statistics of packed data.")


@app.callback()
def _commands() -> None:
    """Make the functions commands, even where there is only one: Typer needs a callback for that."""


@app.command()
def quality(
    pack: Annotated[Path, typer.Argument(help="Folder of a pack.")],
    epoch: Annotated[int, typer.Option(min=0, help="Epoch whose order is measured.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the run.")] = 0,
    shuffle: Annotated[str, typer.Option(help="Shuffle of the run, as data.shuffle in a recipe.")] = "epoch",
    batch: Annotated[int, typer.Option(min=1, help="Samples of a step over all ranks.")] = 256,
    supernodes: Annotated[int, typer.Option(min=1, help="Switches of the cluster whose traffic is predicted.")] = 1,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes under each switch.")] = 1,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks on each node.")] = 1,
    groups: Annotated[int, typer.Option(min=1, help="Copies of the pack, as data.groups in a recipe.")] = 1,
    buffer_megabytes: Annotated[int, typer.Option(min=1, help="Shuffle buffer of the streamed order.")] = 1024,
) -> None:
    """Show the quality of the shuffle: an epoch's order, in memory and streamed, compared with true permutations.

    With several ranks, a second table has its mixing and its predicted traffic beside those of "epoch".
    """
    from unisono.data.requirements import check_installed

    check_installed()
    import numpy as np
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from unisono.data.order import epoch_order, epoch_rng
    from unisono.data.pack.index import read_index
    from unisono.data.quality import PERMUTATIONS, Quality, compare_with_permutations, shuffle_shares
    from unisono.data.quality import quality as measure
    from unisono.data.shuffle_options import ShuffleOptions, parse_shuffle
    from unisono.data.shuffle_report import COMPARED_EPOCHS, ROWS, shuffle_report
    from unisono.data.storage.streamed_order import blocks_of_pack, streamed_order
    from unisono.placement import regular

    options, placement = parse_shuffle(shuffle), regular(supernodes, nodes, ranks)
    index = read_index(pack)
    found = compare_with_permutations(epoch_order(len(index), batch, seed, epoch, options), index.label)
    table = Table(title=f"{escape(str(pack))}: the order of epoch {epoch}, and {PERMUTATIONS} true permutations")
    for head in ("", "epoch", "true permutation", "as packed", "streamed"):
        table.add_column(head, justify="right" if head else "left")
    packed = measure(np.arange(len(index)), index.label)
    order = streamed_order(blocks_of_pack(index), batch, buffer_megabytes << 20, epoch_rng(seed, epoch))
    streamed = compare_with_permutations(shuffle_shares(order, batch, placement.ranks), index.label)
    words = ("neighbours of one class", "neighbours that stayed neighbours", "distance moved")
    for name, row in zip(Quality._fields, words, strict=True):
        true = f"{getattr(found.mean, name):.5f} ± {getattr(found.std, name):.5f}"
        in_memory, before, read = (f"{getattr(each, name):.5f}" for each in (found.found, packed, streamed.found))
        table.add_row(row, in_memory, true, before, read)
    Console().print(table)
    if placement.ranks > 1:
        beside = Table(title=f"{placement.ranks} ranks, batches of {batch}: the mean of epochs 1 to {COMPARED_EPOCHS}")
        for head in ("", str(options), "epoch"):
            beside.add_column(head, justify="right" if head else "left")
        reports = [shuffle_report(index, batch, seed, each, placement, groups) for each in (options, ShuffleOptions())]
        for row, *values in zip(ROWS, *reports, strict=True):
            beside.add_row(row, *(f"{value:.5f}" for value in values))
        Console().print(beside)
    print(f"at most {found.max_z_score:.1f} standard deviations from a true permutation")
    on = "1 rank" if placement.ranks == 1 else f"{placement.ranks} ranks"
    print(f"streamed: at most {streamed.max_z_score:.1f}, for steps of {batch} samples on {on}")
