"""Pictures of steps: a row for each lane of rank 0, time from left to right.

    main           f0··f1··b0··b1······b2······
    update                             p1 s1 u1      letter: operation; figure: bucket, of a forward the parameter
    communication              w0··        a1······

The drawn steps are those that `predict` plays: the rule's programs on the clock. Costs are invented (`drawn_costs`)
unless others are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from unisono.step.costs import Computing, Cost, Costs, Duration
from unisono.step.layout import Layout
from unisono.step.predict import Clock, TaskSpan, tracks
from unisono.step.program import Step, Task
from unisono.step.rule import BaseRule
from unisono.view.svg import Span, SpanRow, draw_spans, draw_text

MIN_TASK_WIDTH = 0.75
"""Smallest width of a drawn task, in units of time: space for a letter, a figure and a space."""


class Picture(NamedTuple):
    """Steps of a rule on rank 0, to be drawn."""

    spans: Sequence[TaskSpan]
    lanes: Sequence[str]
    title: str

    def rows(self) -> list[SpanRow]:
        """Return a row for each thread of a lane that is ever needed; the first has the lane's name."""
        of_lanes = {lane: tracks(span for span in self.spans if span.task.lane == lane) for lane in self.lanes}
        return [
            SpanRow("" if index else lane, [_span(span) for span in track])
            for lane, tracks_of_lane in of_lanes.items()
            for index, track in enumerate(tracks_of_lane)
        ]


def _span(span: TaskSpan) -> Span:
    task = span.task
    tooltip = f"{task}: {span.begin:g} to {span.end:g}"
    return Span(span.begin, span.end, f"{_letter(task)}{task.key}", task.operation.name, tooltip)


def _letter(task: Task) -> str:
    return task.operation.letter or task.operation.name[0]


def drawn_costs(layout: Layout) -> Costs:
    """Return costs for a drawing: 1 unit for a layer's forward, 2 for its backward, 2 for a bucket's allreduce, and 1
    for an exchange of activations."""
    count = layout.parameters
    needed = tuple(float(parameter) for parameter in range(count))
    ready = tuple(float(count + 2 * (count - parameter)) for parameter in range(count))
    nbytes = sum(bucket.nbytes for bucket in layout.buckets) / max(1, len(layout.buckets))
    exchanges = (Duration(1.0, 1.0),) * len(layout.activations)
    computing = Computing(needed, ready, float(3 * count))
    return Costs(layout, computing, Cost(1.0, 1.0 / max(1.0, nbytes)), activations=exchanges)


def picture_of(rule: BaseRule, layout: Layout, steps: int, title: str = "", costs: Costs | None = None) -> Picture:
    """Return the picture of `steps` consecutive steps."""
    used = costs or drawn_costs(layout)
    program = tuple(task for step in range(steps) for task in rule(Step(step), 0, layout))

    def price(_: int, task: Task) -> Duration:
        cost = task.operation.price(task, used)
        shown = task.operation.act is not None and cost.seconds < MIN_TASK_WIDTH
        return Duration(MIN_TASK_WIDTH, cost.link and MIN_TASK_WIDTH) if shown else cost

    threads = rule.threads()
    spans = [span for span in Clock({0: program}, threads, price).run() if span.end > span.begin]
    used_lanes = {span.task.lane for span in spans}
    return Picture(spans, [lane for lane in threads if lane in used_lanes], title)


def draw(picture: Picture) -> str:
    """Return the picture as text, with a legend of the letters."""
    letters: dict[str, dict[str, None]] = {}
    for span in picture.spans:
        letters.setdefault(_letter(span.task), {})[span.task.operation.name] = None
    legend = "  ".join(f"{letter} {' or '.join(names)}" for letter, names in letters.items())
    return "\n".join([*([picture.title, ""] if picture.title else []), *draw_text(picture.rows()), "", legend])


def draw_svg(picture: Picture) -> str:
    """Return the picture as an SVG document. Each task has a title with its name and its times."""
    return draw_spans(picture.rows(), picture.title or "step")
