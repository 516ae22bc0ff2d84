"""Drawing of a schedule as SVG: a line for each rank, time from left to right, an arrow for each message.

    rank 0  ──(2)──────────────      the badge is the chunk, at the end of the arrow where it stands for most messages;
                 ╲                   the color of the arrow distinguishes a sum from a copy
    rank 1  ──────╲────────────
                   ╲
    rank 2  ────────▶──────────

Ranks need not be in the same round at the same time: the message of a leaf in its round 0 is received in a round of its
parent that waits for others as well. So steps are drawn. A message takes one step: the first in which both ends are in
the rounds that name it. A round begins one step after the last message of the round before. Each lane has a separate
panel.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from colorsys import hls_to_rgb
from itertools import pairwise
from typing import NamedTuple
from xml.sax.saxutils import escape

from unisono.errors import ScheduleError
from unisono.placement import Placement
from unisono.schedules.schedule import Action, Algorithm, Program

MAX_PAGE_WIDTH = 1200.0
"""Largest width of a row of panels, in SVG units."""

MARGIN, ROW, LABEL, CAPTION, LEGEND = 20.0, 30.0, 56.0, 40.0, 66.0
"""Sizes in SVG units: outer margin, row of a rank, label of a rank, caption of a panel, top of the panels."""

TEXT_COLOR, GRID_COLOR, NODE_COLORS = "#24292f", "#c8d1da", ("#eef2f6", "#dfe6ee")
COLORS = {Action.ADD: "#c2410c", Action.RECEIVE: "#1d63b5"}
LEGEND_TEXTS = {Action.ADD: "summed into place", Action.RECEIVE: "replaces what was there"}


class TimedMessage(NamedTuple):
    """Message and the step in which it goes from rank to rank."""

    lane: int
    step: int
    sender: int
    receiver: int
    chunk: int
    span: int
    action: Action
    """Action of the receiver: ADD or RECEIVE."""

    @property
    def chunks(self) -> str:
        """Numbers of the chunks, as text."""
        return f"{self.chunk}" if self.span == 1 else f"{self.chunk}-{self.chunk + self.span - 1}"


class _RoundRef(NamedTuple):
    rank: int
    lane: int
    round: int


class _Panel(NamedTuple):
    """Drawn lane, with its upper left corner at (0, 0)."""

    width: float
    height: float
    body: list[str]


def timed_messages(programs: Sequence[Program]) -> list[TimedMessage]:
    """Return all messages of a schedule, by lane and step. Raises ScheduleError if ranks would wait for each other
    forever."""
    ends = _ends(programs)
    begins = _begins(programs, [(start, stop) for start, stop, *_ in ends])
    found = [
        TimedMessage(start.lane, max(begins[start], begins[stop]), start.rank, stop.rank, chunk, span, action)
        for start, stop, chunk, span, action in ends
    ]
    return sorted(found, key=lambda message: message[:-1])


def _ends(programs: Sequence[Program]) -> list[tuple[_RoundRef, _RoundRef, int, int, Action]]:
    """Return the rounds that send and receive each message, matched in order between two ranks in a lane."""
    sent, taken = defaultdict(list), defaultdict(list)
    for rank, program in enumerate(programs):
        for lane, rounds in enumerate(program.lanes):
            for number, transfers in enumerate(rounds):
                for action, peer, chunk, span in transfers:
                    if action is Action.SEND:
                        sent[lane, rank, peer].append(_RoundRef(rank, lane, number))
                    else:
                        taken[lane, peer, rank].append((_RoundRef(rank, lane, number), chunk, span, action))
    return [
        (start, *stop)
        for channel in sent.keys() | taken.keys()
        for start, stop in zip(sent[channel], taken[channel], strict=True)
    ]


def _begins(programs: Sequence[Program], messages: Sequence[tuple[_RoundRef, _RoundRef]]) -> dict[_RoundRef, int]:
    """Return the step in which each round begins."""
    begins = {
        _RoundRef(rank, lane, number): number
        for rank, program in enumerate(programs)
        for lane, rounds in enumerate(program.lanes)
        for number in range(len(rounds))
    }
    moving = True
    while moving:
        moving = False
        for ends in messages:
            step = max(begins[end] for end in ends)
            if step > len(begins):
                raise ScheduleError(f"{ends[0]} and {ends[1]} wait for each other forever")
            for end in ends:
                following = end._replace(round=end.round + 1)
                if begins.get(following, step + 1) <= step:
                    begins[following] = step + 1
                    moving = True
    return begins


def draw_svg(algorithm: Algorithm, ranks: int, name: str = "schedule", placement: Placement | None = None) -> str:
    """Return the schedule of all `ranks` ranks as an SVG document. With a placement, ranks of a node share a shade."""
    programs = [algorithm(rank, ranks) for rank in range(ranks)]
    shades = _shades(placement) if placement else {}
    messages = timed_messages(programs)
    panels = [
        _panel([message for message in messages if message.lane == lane], programs, lane, shades)
        for lane in range(len(programs[0].lanes))
    ]
    width, height, body = _arrange(panels)
    where = f" on {len(placement.nodes)} nodes" if placement and shades else ""
    chunks = f"{programs[0].chunks} chunk{'s' if programs[0].chunks > 1 else ''}"
    title = escape(f"{name}: {ranks} ranks{where}, {chunks}")
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
            f'viewBox="0 0 {width:g} {height:g}" font-family="Helvetica, Arial, sans-serif" font-size="12" '
            f'fill="{TEXT_COLOR}">',
            f"<title>{title}</title>",
            *_markers(),
            f'<rect width="{width:g}" height="{height:g}" fill="white"/>',
            f'<text x="{MARGIN:g}" y="{MARGIN + 10:g}" font-size="17" font-weight="bold">{title}</text>',
            *_legend(messages, bool(shades)),
            *body,
            "</svg>\n",
        ]
    )


def _shades(placement: Placement) -> dict[int, str]:
    """Return a color for each rank; none if every node has one rank."""
    if len(placement.nodes) == placement.ranks:
        return {}
    return {rank: NODE_COLORS[node % 2] for rank, node in enumerate(placement.node_of_rank)}


def _markers() -> list[str]:
    """Return the arrow heads."""
    return [
        f'<marker id="{action.value}" viewBox="0 0 8 8" refX="7.5" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M0,1 L8,4 L0,7 z" fill="{color}"/></marker>'
        for action, color in COLORS.items()
    ]


def _legend(messages: Sequence[TimedMessage], shaded: bool) -> list[str]:
    """Return the legend of the colors that are used."""
    x, y = MARGIN, MARGIN + 30
    drawn: list[str] = []
    for action, words in LEGEND_TEXTS.items():
        if any(message.action is action for message in messages):
            drawn += [_arrow(x, y, x + 34, y, action), f'<text x="{x + 41:g}" y="{y + 4:g}">{words}</text>']
            x += 70 + 6 * len(words)
    if shaded:
        drawn += [
            f'<rect x="{x + 14 * number:g}" y="{y - 8:g}" width="14" height="16" fill="{band}"/>'
            for number, band in enumerate(NODE_COLORS)
        ]
        drawn.append(f'<text x="{x + 35:g}" y="{y + 4:g}">nodes</text>')
        x += 90
    if len({(message.lane, message.chunks) for message in messages}) > len({message.lane for message in messages}):
        drawn += [*_badge(x + 10, y, "2", 2, 8), f'<text x="{x + 24:g}" y="{y + 4:g}">chunk</text>']
    return drawn


def _arrange(panels: Sequence[_Panel]) -> tuple[float, float, list[str]]:
    """Return total width, total height and drawing of panels placed from left to right and from top to bottom."""
    x, y, below, width = MARGIN, LEGEND, LEGEND, 520.0
    body: list[str] = []
    for panel in panels:
        if x > MARGIN and x + panel.width + MARGIN > MAX_PAGE_WIDTH:
            x, y = MARGIN, below
        body += [f'<g transform="translate({x:g},{y:g})">', *panel.body, "</g>"]
        x += panel.width + MARGIN
        width, below = max(width, x), max(below, y + panel.height + MARGIN)
    return width, below, body


def _panel(messages: Sequence[TimedMessage], programs: Sequence[Program], lane: int, shades: dict[int, str]) -> _Panel:
    """Return the panel of one lane. If all its messages carry the same chunks, the caption names them once."""
    ranks = len(programs)
    columns = _columns(messages)
    right = columns[-1]
    ys = [CAPTION + ROW * (rank + 0.5) for rank in range(ranks)]
    chunk_names = {message.chunks for message in messages}
    words = [f"lane {lane}"] if len(programs[0].lanes) > 1 else []
    words += [f"chunk {chunks}" for chunks in chunk_names if len(chunk_names) == 1 < programs[0].chunks]
    drawn = [f'<text y="12" font-weight="bold">{", ".join(words)}</text>'] if words else []
    drawn += [
        f'<rect y="{y - ROW / 2:g}" width="{right:g}" height="{ROW:g}" fill="{shades[rank]}"/>'
        for rank, y in enumerate(ys)
        if rank in shades
    ]
    unit = "round" if _in_step(messages, programs, lane) else "step"
    for step, (start, stop) in enumerate(pairwise(columns)):
        drawn.append(f'<text x="{(start + stop) / 2:g}" y="30" text-anchor="middle">{unit} {step}</text>')
    drawn += [
        f'<path d="M{x:g},{CAPTION - 4:g} V{CAPTION + ROW * ranks:g}" stroke="{GRID_COLOR}" stroke-dasharray="2 3"/>'
        for x in columns
    ]
    for rank, y in enumerate(ys):
        drawn.append(f'<text x="4" y="{y + 4:g}">rank {rank}</text>')
        drawn.append(f'<path d="M{LABEL:g},{y:g} H{right:g}" stroke="{GRID_COLOR}"/>')
    drawn += _messages(messages, columns, ys, programs[0].chunks, badges=len(chunk_names) > 1)
    return _Panel(right, CAPTION + ROW * ranks, drawn)


def _columns(messages: Sequence[TimedMessage]) -> list[float]:
    """Return the x positions where steps begin, and the end of the last. More messages per rank widen a step."""
    edges = [LABEL]
    for step in range(1 + max((message.step for message in messages), default=-1)):
        senders = Counter(message.sender for message in messages if message.step == step)
        receivers = Counter(message.receiver for message in messages if message.step == step)
        fan = max(*senders.values(), *receivers.values())
        edges.append(edges[-1] + min(300, 76 + 24 * (fan - 1)))
    return edges


def _in_step(messages: Sequence[TimedMessage], programs: Sequence[Program], lane: int) -> bool:
    """Return True if all ranks are in the same round at the same time."""
    steps = {(message.sender, message.step) for message in messages} | {
        (message.receiver, message.step) for message in messages
    }
    return steps == {(rank, step) for rank, program in enumerate(programs) for step in range(len(program.lanes[lane]))}


def _messages(
    messages: Sequence[TimedMessage], columns: Sequence[float], ys: Sequence[float], chunks: int, badges: bool
) -> list[str]:
    """Return the arrows, then the badges on top of them, each once."""
    leaving, arriving = defaultdict(set), defaultdict(set)
    for message in messages:
        leaving[message.step, message.sender].add(message.chunks)
        arriving[message.step, message.receiver].add(message.chunks)
    arrows: list[str] = []
    marks: dict[tuple[float, float], list[str]] = {}
    for message in messages:
        tail, head = columns[message.step] + 8, columns[message.step + 1] - 6
        at_tail = len(leaving[message.step, message.sender]) == 1
        half = 4 + 3.5 * len(message.chunks) if badges else 0
        start, stop = (tail + 2 * half, head) if at_tail else (tail, head - 2 * half)
        if badges:
            x, y = (tail + half, ys[message.sender]) if at_tail else (head - half, ys[message.receiver])
            marks[x, y] = _badge(x, y, message.chunks, message.chunk, chunks)
        arrows.append(_arrow(start, ys[message.sender], stop, ys[message.receiver], message.action))
    return arrows + [line for arrow in marks.values() for line in arrow]


def _arrow(x: float, y: float, to_x: float, to_y: float, action: Action) -> str:
    return (
        f'<path d="M{x:g},{y:g} L{to_x:g},{to_y:g}" stroke="{COLORS[action]}" stroke-width="1.4" '
        f'marker-end="url(#{action.value})"/>'
    )


def _badge(x: float, y: float, words: str, chunk: int, chunks: int) -> list[str]:
    """Return the number of a chunk in a rounded rectangle, colored by chunk."""
    half = 4 + 3.5 * len(words)
    red, green, blue = (round(255 * part) for part in hls_to_rgb(chunk / max(1, chunks), 0.85, 0.75))
    return [
        f'<rect x="{x - half:g}" y="{y - 8:g}" width="{2 * half:g}" height="16" rx="7" stroke="{TEXT_COLOR}" '
        f'stroke-width="0.6" fill="#{red:02x}{green:02x}{blue:02x}"/>',
        f'<text x="{x:g}" y="{y + 4:g}" font-size="11" text-anchor="middle">{words}</text>',
    ]
