"""`unisono draw`: a picture of a schedule or of a training step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from unisono.errors import UsageError
from unisono.formats import counted

if TYPE_CHECKING:
    from unisono.placement import Placement

MAX_DRAWN_RANKS = 1024
"""Largest number of ranks of a picture."""

MAX_DRAWN_BUCKETS = 10_000
"""Largest number of buckets of a picture, of all its steps together."""


def draw(
    what: Annotated[str, Argument(help="Name of a schedule, or 'step' for a training step.")],
    ranks: Annotated[int, Option(help="Number of ranks, servers included; of a step, only rank 0 is drawn.")] = 4,
    nodes: Annotated[
        int | None, Option(help="Number of nodes, each with the same number of ranks; default: one per rank.")
    ] = None,
    supernodes: Annotated[int, Option(help="Number of supernodes.")] = 1,
    rule: Annotated[str, Option(help="Rule of a step.")] = "bsp",
    overlap: Annotated[
        str, Option(help="Overlap of communication in a step: chain, phases, concurrent, funnel, none.")
    ] = "chain",
    every: Annotated[int, Option(help="Steps of a period, for local_sgd, diloco and easgd.")] = 2,
    fragments: Annotated[int, Option(help="Parts of the weights that are exchanged in turn, for diloco.")] = 1,
    delay: Annotated[int, Option(help="Steps beside which a part is exchanged, for diloco.")] = 1,
    buckets: Annotated[int, Option(help="Number of buckets of a step.")] = 4,
    steps: Annotated[int, Option(help="Number of consecutive steps.")] = 2,
    svg: Annotated[Path | None, Option(help="Output file for an SVG picture, instead of text.")] = None,
) -> None:
    """Draw a schedule (a row for each rank, a column for each round) or a training step (a row for each lane).

    With --supernodes a schedule has the costs of each round: what a rank sends at most, and of that across.
    """
    nodes = ranks if nodes is None else nodes
    if what == "step":
        options = {"every": every, "period": every, "fragments": fragments, "delay": delay}
        text, vector = _step(rule, overlap, options, ranks, nodes, buckets, steps)
    else:
        from unisono.schedules import find
        from unisono.view import schedule

        placement = _placement(ranks, nodes, supernodes)
        drawn = find(what, placement).allreduce, ranks, what, placement
        text, vector = partial(schedule.draw, *drawn), partial(schedule.draw_svg, *drawn)
    if svg is None:
        print(text())
        return
    from unisono.view.chart import write_picture

    write_picture(svg, vector().encode(), "--svg")


def _step(
    name: str, overlap: str, options: dict[str, int], ranks: int, nodes: int, buckets: int, steps: int
) -> tuple[Callable[[], str], Callable[[], str]]:
    from dataclasses import fields, replace

    from unisono.rules import find_rule
    from unisono.step.layout import even_layout
    from unisono.step.overlaps import find_overlap
    from unisono.view import step

    find_overlap(overlap)
    for option, count in (("ranks", ranks), ("buckets", buckets), ("steps", steps)):
        if count < 1:
            raise UsageError(f"--{option} {count}: a picture of steps has at least 1")
    most = {"ranks": MAX_DRAWN_RANKS, "steps": MAX_DRAWN_BUCKETS // buckets}
    for option, value in {"ranks": ranks, "buckets": buckets, "steps": steps, **options}.items():
        _check_most(option, value, most.get(option, MAX_DRAWN_BUCKETS))
    kind = find_rule(name)
    beside: dict[str, Any] = {entry.name: options[entry.name] for entry in fields(kind) if entry.name in options}
    built = kind(overlap=overlap, **beside)
    title = f"{name}, {overlap}, {counted(buckets, 'bucket')}, {counted(steps, 'step')}"
    layout = replace(even_layout(ranks, buckets), nodes=_placement(ranks, nodes, 1).nodes)
    drawn = step.picture_of(built, layout, steps, title)
    return partial(step.draw, drawn), partial(step.draw_svg, drawn)


def _placement(ranks: int, nodes: int, supernodes: int) -> Placement:
    from unisono.placement import regular

    if ranks < 1:
        raise UsageError(f"--ranks {ranks}: the number of ranks must be at least 1")
    _check_most("ranks", ranks, MAX_DRAWN_RANKS)
    if nodes < 1 or ranks % nodes:
        raise UsageError(f"--nodes {nodes}: {ranks} ranks do not spread evenly over {nodes} nodes")
    if supernodes < 1 or nodes % supernodes:
        raise UsageError(f"--supernodes {supernodes}: {nodes} nodes do not spread evenly over {supernodes} supernodes")
    return regular(supernodes, nodes // supernodes, ranks // nodes)


def _check_most(option: str, value: int, most: int) -> None:
    if value > most:
        raise UsageError(f"--{option} {value:,}: the limit is {most:,}")
