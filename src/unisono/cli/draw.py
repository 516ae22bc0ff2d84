"""`unisono draw`: a picture of a schedule or of a training step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unisono.errors import UsageError

if TYPE_CHECKING:
    from unisono.placement import Placement

MAX_DRAWN_RANKS = 1024
"""Largest number of ranks of a picture."""

MAX_DRAWN_BUCKETS = 10_000
"""Largest number of buckets of a picture, of all its steps together."""


def draw(
    what: Annotated[str, typer.Argument(help="Name of a schedule, or 'step' for a training step.")],
    ranks: Annotated[int, typer.Option(help="Number of ranks, servers included; of a step, only rank 0 is drawn.")] = 4,
    nodes: Annotated[
        int | None, typer.Option(help="Number of nodes, each with the same number of ranks; default: one per rank.")
    ] = None,
    supernodes: Annotated[int, typer.Option(help="Number of supernodes.")] = 1,
    rule: Annotated[str, typer.Option(help="Rule of a step.")] = "bsp",
    overlap: Annotated[
        str, typer.Option(help="Overlap of communication in a step: chain, phases, concurrent, funnel, none.")
    ] = "chain",
    every: Annotated[int, typer.Option(help="Steps of a period, for local_sgd, diloco and easgd.")] = 2,
    fragments: Annotated[int, typer.Option(help="Parts of the weights that are exchanged in turn, for diloco.")] = 1,
    delay: Annotated[int, typer.Option(help="Steps beside which a part is exchanged, for diloco.")] = 1,
    buckets: Annotated[int, typer.Option(help="Number of buckets of a step.")] = 4,
    steps: Annotated[int, typer.Option(help="Number of consecutive steps.")] = 2,
    svg: Annotated[Path | None, typer.Option(help="Output file for an SVG picture, instead of text.")] = None,
) -> None:
    """Draw a schedule (a row for each rank, a column for each round) or a training step (a row for each lane).

    With --supernodes a schedule has the costs of each round: what a rank sends at most, and of that across.
    """
    if what == "step":
        text, vector = _step(
            *(rule, overlap, {"every": every, "period": every, "fragments": fragments, "delay": delay}),
            *(ranks, ranks if nodes is None else nodes, buckets, steps),
        )
    else:
        text, vector = _schedule(what, _placement(ranks, ranks if nodes is None else nodes, supernodes))
    if svg is None:
        print(text())
        return
    from unisono.view.chart import write_picture

    write_picture(svg, vector().encode(), "--svg")


def _schedule(name: str, placement: Placement) -> tuple[Callable[[], str], Callable[[], str]]:
    from unisono.schedules import find
    from unisono.view import schedule

    algorithm, ranks = find(name, placement).allreduce, placement.ranks
    return lambda: schedule.draw(algorithm, ranks, name, placement), lambda: schedule.draw_svg(
        algorithm, ranks, name, placement
    )


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
    names = {entry.name for entry in fields(kind)}
    beside: dict[str, Any] = {option: value for option, value in options.items() if option in names}
    rule = kind(overlap=overlap, **beside)
    title = f"{name}, {overlap}, {buckets} bucket{'s' * (buckets > 1)}, {steps} step{'s' * (steps > 1)}"
    layout = replace(even_layout(ranks, buckets), nodes=_placement(ranks, nodes, 1).nodes)
    drawn = step.picture_of(rule, layout, steps, title)
    return lambda: step.draw(drawn), lambda: step.draw_svg(drawn)


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
    """Raise UsageError for a value above the limit of an option."""
    if value > most:
        raise UsageError(f"--{option} {value:,}: the limit is {most:,}")
