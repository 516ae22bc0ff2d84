"""`unisono draw`: a picture of a schedule or of a training step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unisono.errors import UsageError

if TYPE_CHECKING:
    from unisono.placement import Placement


def draw(
    what: Annotated[str, typer.Argument(help="A schedule's name, or: step.")],
    ranks: Annotated[int, typer.Option(help="How many ranks to draw; of a step, rank 0 alone.")] = 4,
    nodes: Annotated[
        int | None, typer.Option(help="Over how many nodes they spread, each with as many; a node each if not given.")
    ] = None,
    supernodes: Annotated[int, typer.Option(help="Over how many supernodes the nodes spread.")] = 1,
    rule: Annotated[str, typer.Option(help="Of a step: the rule.")] = "bsp",
    overlap: Annotated[str, typer.Option(help="Of a step: where communication sits.")] = "chain",
    every: Annotated[int, typer.Option(help="Of a step of local_sgd: steps between two averages.")] = 2,
    buckets: Annotated[int, typer.Option(help="Of a step: how many buckets travel.")] = 4,
    steps: Annotated[int, typer.Option(help="How many steps follow one another.")] = 2,
    svg: Annotated[Path | None, typer.Option(help="Write the picture to this file, as SVG, instead.")] = None,
) -> None:
    """Draw a schedule (a row for each rank, a column for each round) or a training step (a row for each lane)."""
    if what == "step":
        text, vector = _step(rule, overlap, every, ranks, buckets, steps)
    else:
        text, vector = _schedule(what, _placement(ranks, ranks if nodes is None else nodes, supernodes))
    if svg is None:
        print(text())
        return
    try:
        svg.write_text(vector(), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--svg {svg}: {error.strerror}") from error


def _schedule(name: str, placement: Placement) -> tuple[Callable[[], str], Callable[[], str]]:
    from unisono.schedules import find
    from unisono.schedules.picture import draw as picture
    from unisono.schedules.vector import draw_svg

    algorithm, ranks = find(name, placement).allreduce, placement.ranks
    return lambda: picture(algorithm, ranks, name), lambda: draw_svg(algorithm, ranks, name, placement)


def _step(
    name: str, overlap: str, every: int, ranks: int, buckets: int, steps: int
) -> tuple[Callable[[], str], Callable[[], str]]:
    from dataclasses import fields

    from unisono.rules import find_rule
    from unisono.step.draw import draw as picture
    from unisono.step.draw import draw_svg, picture_of
    from unisono.step.layout import even_layout
    from unisono.step.overlaps import find_overlap

    find_overlap(overlap)
    for option, number in (("ranks", ranks), ("buckets", buckets), ("steps", steps)):
        if number < 1:
            raise UsageError(f"--{option} {number}: a picture of steps has at least 1")
    kind = find_rule(name)
    beside: dict[str, Any] = {"every": every} if any(entry.name == "every" for entry in fields(kind)) else {}
    rule = kind(overlap=overlap, **beside)
    title = f"{name}, {overlap}, {buckets} bucket{'s' * (buckets > 1)}, {steps} step{'s' * (steps > 1)}"
    drawn = picture_of(rule, even_layout(ranks, buckets), steps, title)
    return lambda: picture(drawn), lambda: draw_svg(drawn)


def _placement(ranks: int, nodes: int, supernodes: int) -> Placement:
    from unisono.placement import regular

    if ranks < 1:
        raise UsageError(f"--ranks {ranks}: a schedule has at least 1 rank")
    if nodes < 1 or ranks % nodes:
        raise UsageError(f"--nodes {nodes}: {ranks} ranks do not spread evenly over {nodes} nodes")
    if supernodes < 1 or nodes % supernodes:
        raise UsageError(f"--supernodes {supernodes}: {nodes} nodes do not spread evenly over {supernodes} supernodes")
    return regular(supernodes, nodes // supernodes, ranks // nodes)
