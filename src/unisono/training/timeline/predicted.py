"""Predicted spans of the steps of a run: a predicted step, laid at the begin of each measured one.

    a predicted step           │ forward │   backward 1   │           measured steps that begin at 0 and at 10
                                              │ allreduce 1 │

    predicted main             │ forward │   backward 1   │ │ forward │   backward 1   │
    predicted communication                   │ allreduce 1 │             │ allreduce 1 │
                               0                            10

Where a step was faster than predicted, the end of its prediction overlaps with the next one: that goes to a lane of its
own below, "predicted main 2". So do predicted collectives that run at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from unisono.step import operations as op
from unisono.step.clock import TaskSpan
from unisono.step.tracks import tracks
from unisono.training.timeline.lanes import PREDICTED, TimelineSpan

KIND = "predicted"
"""Kind of predicted spans."""


class PredictedStep(NamedTuple):
    """Begin of a measured step, and its predicted spans in seconds since then."""

    begin: float
    """Seconds."""
    spans: Sequence[TimelineSpan]


def spans_of(step: Sequence[TaskSpan]) -> list[TimelineSpan]:
    """Return the spans of a played step. Tasks that take no time are left out.

    Parameters that are read one after another, without a wait between them, are one span: `forward`.
    """
    found: list[TimelineSpan] = []
    forward: int | None = None  # place of the last of these
    for span in sorted((one for one in step if one.end > one.begin), key=lambda one: one.begin):
        reads = span.task.operation in (op.BEGIN, op.FORWARD)
        name, lane = op.FORWARD.name if reads else str(span.task), PREDICTED + span.task.lane
        if reads and forward is not None and found[forward].end == span.begin:
            found[forward] = found[forward]._replace(end=span.end)
            continue
        forward = len(found) if reads else forward
        found.append(TimelineSpan(name, KIND, lane, span.begin, span.end))
    return found


def lay(steps: Sequence[PredictedStep]) -> list[TimelineSpan]:
    """Return the predicted spans of all steps, on the clock of their begins, by lane and in order of time."""
    laid = [one._replace(begin=begin + one.begin, end=begin + one.end) for begin, spans in steps for one in spans]
    return [
        one if number == 1 else one._replace(lane=f"{lane} {number}")
        for lane in dict.fromkeys(one.lane for one in laid)
        for number, track in enumerate(tracks(one for one in laid if one.lane == lane), 1)
        for one in track
    ]
