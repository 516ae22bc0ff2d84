"""`unisono data`: statistics of packed data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="What can be said of packed data.")


@app.callback()
def _commands() -> None:
    """Make the functions commands, even where there is only one: Typer needs a callback for that."""


@app.command()
def quality(
    pack: Annotated[Path, typer.Argument(help="The folder of a pack.")],
    epoch: Annotated[int, typer.Option(min=0, help="The epoch whose order is looked at.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="The seed of the run.")] = 0,
) -> None:
    """Show the quality of the shuffle: an epoch's order of samples, beside true permutations."""
    import numpy as np
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from unisono.data.order import permutation
    from unisono.data.pack.index import read_index
    from unisono.data.quality import PERMUTATIONS, Quality, beside_permutations
    from unisono.data.quality import quality as measure

    index = read_index(pack)
    found = beside_permutations(permutation(len(index), seed, epoch), index.label)
    table = Table(title=f"{escape(str(pack))}: the order of epoch {epoch} beside {PERMUTATIONS} true permutations")
    for head in ("", "epoch", "true permutation", "as packed"):
        table.add_column(head, justify="right" if head else "left")
    packed = measure(np.arange(len(index)), index.label)
    words = ("neighbours of one class", "neighbours that stayed neighbours", "distance moved")
    for name, row in zip(Quality._fields, words, strict=True):
        true = f"{getattr(found.mean, name):.5f} ± {getattr(found.deviation, name):.5f}"
        table.add_row(row, f"{getattr(found.found, name):.5f}", true, f"{getattr(packed, name):.5f}")
    Console().print(table)
    print(f"at most {found.off:.1f} deviations from a true permutation")
