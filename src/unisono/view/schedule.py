"""Pictures of a schedule, as text and as SVG.

As text, a row for each rank, a column for each round:

    2→1      chunk 2 is sent to rank 1
    +0←3     chunk 0 from rank 3 is summed into place
    0←3      chunk 0 from rank 3 replaces what was there
    4-7→1    chunks 4 to 7 in one message

As SVG, a line for each rank, time from left to right, an arrow for each message:

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

from unisono.errors import ScheduleError
from unisono.placement import Placement
from unisono.schedules.schedule import Action, Algorithm, Program, Transfer
from unisono.view.svg import INK, MARGIN, TITLE_HEIGHT, LegendEntry, arrow, arrow_head, box, element, legend, page, text

MAX_PAGE_WIDTH = 1200.0
"""Largest width of a row of panels, in SVG units."""

ROW, LABEL, CAPTION = 30.0, 60.0, 40.0
"""Sizes in SVG units: row of a rank, label of a rank, caption of a panel."""

SHADES = (0.05, 0.12)
"""Opacity of the bands of nodes."""

COLORS = {Action.ADD: "#d9600a", Action.RECEIVE: "#0a76c4"}
MEANINGS = {Action.ADD: "summed into place", Action.RECEIVE: "replaces what was there"}


def draw(algorithm: Algorithm, ranks: int, name: str = "schedule") -> str:
    """Return the schedule of all `ranks` ranks as lines of text, with a table for each lane."""
    programs = [algorithm(rank, ranks) for rank in range(ranks)]
    lines = [f"{name}: {ranks} ranks, {programs[0].chunks} chunks"]
    for lane in range(len(programs[0].lanes)):
        if len(programs[0].lanes) > 1:
            lines += ["", f"lane {lane}"]
        cells = [[" ".join(map(_cell, transfers)) for transfers in program.lanes[lane]] for program in programs]
        rounds = max(map(len, cells))
        columns = [[row[number] if number < len(row) else "" for row in cells] for number in range(rounds)]
        widths = [max(len(f"round {number}"), *map(len, column)) for number, column in enumerate(columns)]
        label = len(f"rank {ranks - 1}")
        head = "  ".join(f"round {number}".ljust(width) for number, width in enumerate(widths))
        lines.append(f"{'':{label}}  {head}".rstrip())
        for rank in range(ranks):
            row = "  ".join(column[rank].ljust(width) for column, width in zip(columns, widths, strict=True))
            lines.append(f"{f'rank {rank}':{label}}  {row}".rstrip())
    return "\n".join(lines)


def _cell(transfer: Transfer) -> str:
    chunks = _chunks(transfer.chunk, transfer.span)
    match transfer.action:
        case Action.SEND:
            return f"{chunks}→{transfer.peer}"
        case Action.ADD:
            return f"+{chunks}←{transfer.peer}"
        case Action.RECEIVE:
            return f"{chunks}←{transfer.peer}"


def _chunks(first: int, count: int) -> str:
    return f"{first}" if count == 1 else f"{first}-{first + count - 1}"


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
        return _chunks(self.chunk, self.span)


class _RoundRef(NamedTuple):
    rank: int
    lane: int
    round: int


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


class _Panel(NamedTuple):
    """Drawn lane, with its upper left corner at (0, 0)."""

    width: float
    height: float
    body: list[str]


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
    heads = [arrow_head(action.value, color) for action, color in COLORS.items()]
    marks = legend(_legend(messages, bool(shades)), MARGIN + TITLE_HEIGHT)
    return page(width, height, f"{name}: {ranks} ranks{where}, {chunks}", [*heads, *marks, *body])


def _shades(placement: Placement) -> dict[int, float]:
    """Return the opacity of each rank's band; none if every node has one rank."""
    if len(placement.nodes) == placement.ranks:
        return {}
    return {rank: SHADES[node % 2] for rank, node in enumerate(placement.node_of_rank)}


def _legend(messages: Sequence[TimedMessage], shaded: bool) -> list[LegendEntry]:
    """Return the meanings of the colors that are used."""
    used = [action for action in MEANINGS if any(message.action is action for message in messages)]
    found = [LegendEntry([_arrow(0, 0, 34, 0, action)], 34, MEANINGS[action]) for action in used]
    if shaded:
        bands = [_band(14 * number, -8, 14, 16, shade) for number, shade in enumerate(SHADES)]
        found.append(LegendEntry(bands, 28, "nodes"))
    if len({(message.lane, message.chunks) for message in messages}) > len({message.lane for message in messages}):
        found.append(LegendEntry(_badge(10, 0, "2", 2, 8), 20, "chunk"))
    return found


def _arrange(panels: Sequence[_Panel]) -> tuple[float, float, list[str]]:
    """Return total width, total height and drawing of panels placed from left to right and from top to bottom."""
    x, y, width = MARGIN, MARGIN + TITLE_HEIGHT + 20, 520.0
    below, body = y, list[str]()
    for panel in panels:
        if x > MARGIN and x + panel.width + MARGIN > MAX_PAGE_WIDTH:
            x, y = MARGIN, below
        body.append(element("g", *panel.body, transform=f"translate({x:g},{y:g})", class_="lane"))
        x += panel.width + MARGIN
        width, below = max(width, x), max(below, y + panel.height + MARGIN)
    return width, below, body


def _panel(
    messages: Sequence[TimedMessage], programs: Sequence[Program], lane: int, shades: dict[int, float]
) -> _Panel:
    """Return the panel of one lane. If all its messages carry the same chunks, the caption names them once."""
    columns = _columns(messages)
    right, bottom = columns[-1], CAPTION + ROW * len(programs)
    ys = [CAPTION + ROW * (rank + 0.5) for rank in range(len(programs))]
    chunk_names = {message.chunks for message in messages}
    words = [f"lane {lane}"] if len(programs[0].lanes) > 1 else []
    words += [f"chunk {chunks}" for chunks in chunk_names if len(chunk_names) == 1 < programs[0].chunks]
    drawn = [text(0, 12, ", ".join(words), font_weight="bold")] if words else []
    drawn += [_band(0, ys[rank] - ROW / 2, right, ROW, shade) for rank, shade in shades.items()]
    unit = "round" if _in_step(messages, programs, lane) else "step"
    for step, (start, stop) in enumerate(pairwise(columns)):
        drawn.append(text((start + stop) / 2, 30, f"{unit} {step}", text_anchor="middle"))
    drawn += [_line(f"M{x:g},{CAPTION - 4:g} V{bottom:g}", stroke_dasharray="2 3") for x in columns]
    for rank, y in enumerate(ys):
        drawn += [text(4, y + 4, f"rank {rank}"), _line(f"M{LABEL:g},{y:g} H{right:g}")]
    drawn += _messages(messages, columns, ys, programs[0].chunks, badges=len(chunk_names) > 1)
    return _Panel(right, bottom, drawn)


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
    steps = {(rank, message.step) for message in messages for rank in (message.sender, message.receiver)}
    return steps == {(rank, step) for rank, program in enumerate(programs) for step in range(len(program.lanes[lane]))}


def _messages(
    messages: Sequence[TimedMessage], columns: Sequence[float], ys: Sequence[float], chunks: int, badges: bool
) -> list[str]:
    """Return the arrows, then the badges on top of them, each once."""
    leaving = defaultdict(set)
    for message in messages:
        leaving[message.step, message.sender].add(message.chunks)
    arrows: list[str] = []
    marks: dict[tuple[float, float], list[str]] = {}
    for message in messages:
        tail, head = columns[message.step] + 8, columns[message.step + 1] - 6
        at_tail = len(leaving[message.step, message.sender]) == 1
        half = _half(message.chunks) if badges else 0
        start, stop = (tail + 2 * half, head) if at_tail else (tail, head - 2 * half)
        if badges:
            x, y = (tail + half, ys[message.sender]) if at_tail else (head - half, ys[message.receiver])
            marks[x, y] = _badge(x, y, message.chunks, message.chunk, chunks)
        arrows.append(_arrow(start, ys[message.sender], stop, ys[message.receiver], message.action))
    return arrows + [line for badge in marks.values() for line in badge]


def _arrow(x: float, y: float, to_x: float, to_y: float, action: Action) -> str:
    return arrow(x, y, to_x, to_y, action.value, COLORS[action])


def _line(path: str, **attributes: str) -> str:
    return element("path", d=path, stroke="currentColor", stroke_opacity=0.25, **attributes)


def _band(x: float, y: float, width: float, height: float, shade: float) -> str:
    return box(x, y, width, height, fill_opacity=shade)


def _badge(x: float, y: float, words: str, chunk: int, chunks: int) -> list[str]:
    """Return the number of a chunk in a rounded rectangle, colored by chunk."""
    half = _half(words)
    red, green, blue = (round(255 * part) for part in hls_to_rgb(chunk / max(1, chunks), 0.85, 0.75))
    color = f"#{red:02x}{green:02x}{blue:02x}"
    return [
        box(x - half, y - 8, 2 * half, 16, rx=7, stroke=INK, stroke_width=0.6, fill=color),
        text(x, y + 4, words, font_size=11, text_anchor="middle", fill=INK),
    ]


def _half(words: str) -> float:
    """Return half the width of a badge."""
    return 4 + 3.5 * len(words)
