"""Drawing of steps as text and as SVG: a row for each lane of rank 0, time from left to right.

    main           f0··f1··b0··b1······b2······
    update                             p1 s1 u1      letter: operation; figure: bucket, of a forward the parameter
    communication              w0··        a1······

The drawn steps are those that `predict` plays: the rule's programs on the clock. Costs are invented (`drawn_costs`)
unless others are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from unisono.step.clock import Clock, TaskSpan, tracks
from unisono.step.costs import Computing, Cost, Costs, Duration
from unisono.step.layout import Layout
from unisono.step.program import Step, Task
from unisono.step.rule import BaseRule

COLUMNS = 4
"""Characters per unit of time."""

MIN_TASK_WIDTH = 0.75
"""Smallest width of a drawn task, in units of time: space for a letter, a figure and a space."""

ROW, LABEL, UNIT, MARGIN = 30.0, 120.0, 34.0, 20.0
"""Sizes in the SVG: height of a lane, width of its name, width of a unit of time, and outer margin."""

COLORS = ("#9ecae1", "#4292c6", "#fd8d3c", "#74c476", "#dadaeb", "#bcbddc", "#fdae6b", "#c7e9c0", "#e7969c", "#cedb9c")
INK = "#24292f"


@dataclass(frozen=True)
class Picture:
    """Steps of a rule on rank 0, to be drawn."""

    spans: Sequence[TaskSpan]
    lanes: Sequence[str]
    title: str


def drawn_costs(layout: Layout) -> Costs:
    """Return costs for a drawing: 1 unit for a layer's forward, 2 for its backward, 2 for a bucket's allreduce, and 1
    for an exchange of activations."""
    count = layout.parameters
    needed = tuple(float(number) for number in range(count))
    ready = tuple(float(count + 2 * (count - number)) for number in range(count))
    nbytes = sum(one.nbytes for one in layout.buckets) / max(1, len(layout.buckets))
    exchanges = (Duration(1.0, 1.0),) * len(layout.activations)
    computing = Computing(needed, ready, float(3 * count))
    return Costs(layout, computing, Cost(1.0, 1.0 / max(1.0, nbytes)), activations=exchanges)


def picture_of(rule: BaseRule, layout: Layout, steps: int, title: str = "", costs: Costs | None = None) -> Picture:
    """Return the picture of `steps` consecutive steps."""
    used = costs or drawn_costs(layout)
    program = tuple(task for number in range(steps) for task in rule(Step(number), 0, layout))

    def price(_: int, task: Task) -> Duration:
        found = task.operation.price(task, used)
        shown = task.operation.act is not None and found.seconds < MIN_TASK_WIDTH
        return Duration(MIN_TASK_WIDTH, found.link and MIN_TASK_WIDTH) if shown else found

    threads = rule.threads()
    spans = [span for span in Clock({0: program}, threads, price).run() if span.end > span.begin]
    used_lanes = {span.task.lane for span in spans}
    return Picture(spans, [lane for lane in threads if lane in used_lanes], title)


def draw(picture: Picture) -> str:
    """Return the picture as text, with a legend of the letters."""
    width = max(map(len, picture.lanes), default=0)
    rows = [f"{name:>{width}} │{row}" for lane in picture.lanes for name, row in _rows(picture, lane)]
    letters = {_letter(span.task): span.task.operation.name for span in picture.spans}
    legend = "  ".join(f"{letter} {name}" for letter, name in letters.items())
    return "\n".join([*([picture.title, ""] if picture.title else []), *rows, "", legend])


def _rows(picture: Picture, lane: str) -> list[tuple[str, str]]:
    """Return a row for each thread of a lane that is ever needed: its name, and its tasks."""
    rows: list[tuple[str, str]] = []
    for track in tracks(one for one in picture.spans if one.task.lane == lane):
        row = ""
        for span in track:
            first, last = (round(time * COLUMNS) for time in (span.begin, span.end))
            label = f"{_letter(span.task)}{span.task.key}".ljust(last - first, "·")
            row = row.ljust(first) + label[: max(1, last - first - 1)]
        rows.append((lane if not rows else "", row))
    return rows


def _letter(task: Task) -> str:
    return task.operation.letter or task.operation.name[0]


def draw_svg(picture: Picture) -> str:
    """Return the picture as an SVG document. Each task has a title with its name and its times."""
    names = list(dict.fromkeys(span.task.operation.name for span in sorted(picture.spans, key=lambda one: one.begin)))
    colors = {name: COLORS[number % len(COLORS)] for number, name in enumerate(names)}
    end = max((span.end for span in picture.spans), default=0.0)
    top = MARGIN + 56
    body, y = [], top
    for lane in picture.lanes:
        rows = tracks(span for span in picture.spans if span.task.lane == lane)
        body.append(f'<text x="{MARGIN:g}" y="{y + ROW / 2 + 4:g}">{escape(lane)}</text>')
        for track in rows:
            body += [_box(span, y, colors) for span in track]
            y += ROW
        y += 6
    width, height = MARGIN * 2 + LABEL + end * UNIT, y + MARGIN
    title = escape(picture.title or "step")
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
            f'viewBox="0 0 {width:g} {height:g}" font-family="Helvetica, Arial, sans-serif" font-size="12" '
            f'fill="{INK}">',
            f"<title>{title}</title>",
            f'<rect width="{width:g}" height="{height:g}" fill="white"/>',
            f'<text x="{MARGIN:g}" y="{MARGIN + 10:g}" font-size="17" font-weight="bold">{title}</text>',
            *_legend(colors),
            *body,
            "</svg>\n",
        ]
    )


def _box(span: TaskSpan, y: float, colors: dict[str, str]) -> str:
    x, width = MARGIN + LABEL + span.begin * UNIT, (span.end - span.begin) * UNIT
    label = f"{_letter(span.task)}{span.task.key}"
    return (
        f"<g><title>{escape(str(span.task))}: {span.begin:g} to {span.end:g}</title>"
        f'<rect x="{x:g}" y="{y:g}" width="{max(1.0, width - 1):g}" height="{ROW - 6:g}" rx="2" '
        f'fill="{colors[span.task.operation.name]}"/>'
        f'<text x="{x + 4:g}" y="{y + ROW / 2 + 1:g}" font-size="11">{escape(label)}</text></g>'
    )


def _legend(colors: dict[str, str]) -> list[str]:
    x, y, drawn = MARGIN, MARGIN + 32, []
    for name, color in colors.items():
        drawn.append(f'<rect x="{x:g}" y="{y - 10:g}" width="12" height="12" rx="2" fill="{color}"/>')
        drawn.append(f'<text x="{x + 17:g}" y="{y:g}">{escape(name)}</text>')
        x += 36 + 7 * len(name)
    return drawn
