"""Predicted spans of the steps of a run: a predicted step, laid at the begin of each measured one.

    a predicted step           │ forward │   backward 1   │           measured steps that begin at 0 and at 10
                                              │ allreduce 1 │

    predicted main             │ forward │   backward 1   │ │ forward │   backward 1   │
    predicted communication                   │ allreduce 1 │             │ allreduce 1 │
                               0                            10

The prediction of a step that was faster than predicted ends after the next one begins. That one goes, as a whole, to a
lane of its own below: "predicted main 2". Predicted collectives that run at once have a lane each, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from unisono.step import operations as op
from unisono.step.clock import TaskSpan, tracks
from unisono.training.timeline.lanes import PREDICTED, TimelineSpan

KIND = "predicted"
"""Kind of predicted spans."""


class PredictedStep(NamedTuple):
    """Begin of a measured step, and its predicted spans in seconds since then."""

    begin: float
    """Seconds."""
    spans: Sequence[TimelineSpan]


class LaidStep(NamedTuple):
    """Spans of one step in one lane, on the clock of all steps, and the time that they take together."""

    begin: float
    """Seconds."""
    end: float
    spans: list[TimelineSpan]


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
    lanes = dict.fromkeys(one.lane for step in steps for one in step.spans)
    return [span for lane in lanes for span in _numbered([*_laid(steps, lane)])]


def _laid(steps: Sequence[PredictedStep], lane: str) -> Iterator[LaidStep]:
    """Yield what steps have in a lane."""
    for begin, spans in steps:
        mine = [one._replace(begin=begin + one.begin, end=begin + one.end) for one in spans if one.lane == lane]
        if mine:
            yield LaidStep(min(one.begin for one in mine), max(one.end for one in mine), mine)


def _numbered(steps: Sequence[LaidStep]) -> Iterator[TimelineSpan]:
    """Yield the spans of a lane, in lanes of their own where they overlap: first spans of one step, then steps."""
    height = max(len(tracks(step.spans)) for step in steps)
    for turn, together in enumerate(tracks(steps)):
        for step in together:
            for row, track in enumerate(tracks(step.spans)):
                number = turn * height + row + 1
                yield from (one if number == 1 else one._replace(lane=f"{one.lane} {number}") for one in track)
