"""`unisono draw`: a schedule as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unisono.errors import UsageError

if TYPE_CHECKING:
    from unisono.placement import Placement


def draw(
    schedule: Annotated[str, typer.Argument(help="The schedule's name.")],
    ranks: Annotated[int, typer.Option(help="How many ranks to draw.")] = 4,
    nodes: Annotated[
        int | None, typer.Option(help="Over how many nodes they spread, each with as many; a node each if not given.")
    ] = None,
    supernodes: Annotated[int, typer.Option(help="Over how many supernodes the nodes spread.")] = 1,
    svg: Annotated[Path | None, typer.Option(help="Write the picture to this file, as SVG, instead.")] = None,
) -> None:
    """Draw a schedule: a row for each rank, a column for each round."""
    from unisono.schedules import find
    from unisono.schedules.picture import draw as picture
    from unisono.schedules.vector import draw_svg

    placement = _placement(ranks, ranks if nodes is None else nodes, supernodes)
    algorithm = find(schedule, placement).allreduce
    if svg is None:
        print(picture(algorithm, ranks, schedule))
        return
    try:
        svg.write_text(draw_svg(algorithm, ranks, schedule, placement), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--svg {svg}: {error.strerror}") from error


def _placement(ranks: int, nodes: int, supernodes: int) -> Placement:
    from unisono.placement import regular

    if ranks < 1:
        raise UsageError(f"--ranks {ranks}: a schedule has at least 1 rank")
    if nodes < 1 or ranks % nodes:
        raise UsageError(f"--nodes {nodes}: {ranks} ranks do not spread evenly over {nodes} nodes")
    if supernodes < 1 or nodes % supernodes:
        raise UsageError(f"--supernodes {supernodes}: {nodes} nodes do not spread evenly over {supernodes} supernodes")
    return regular(supernodes, nodes // supernodes, ranks // nodes)
