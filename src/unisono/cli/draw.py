"""`unisono draw`: a schedule as a picture."""

from __future__ import annotations

from typing import Annotated

import typer

from unisono.errors import UsageError


def draw(
    schedule: Annotated[str, typer.Argument(help="The schedule's name.")],
    ranks: Annotated[int, typer.Option(help="How many ranks to draw.")] = 4,
) -> None:
    """Draw a schedule: a row for each rank, a column for each round."""
    from unisono.placement import apart
    from unisono.schedules import find
    from unisono.schedules.picture import draw as picture

    if ranks < 1:
        raise UsageError(f"--ranks {ranks}: a schedule has at least 1 rank")
    print(picture(find(schedule, apart(ranks)).allreduce, ranks, schedule))
