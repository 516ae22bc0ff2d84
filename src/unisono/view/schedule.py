"""Pictures of a schedule, as text and as SVG.

As text, a row for each rank, a column for each round:

    2→1      chunk 2 is sent to rank 1
    +0←3     chunk 0 from rank 3 is summed into place
    0←3      chunk 0 from rank 3 replaces what was there
    4-7→1    chunks 4 to 7 in one message

As SVG, a row for each rank, time from left to right, an arrow for each message to the boxes of what a rank receives in
that step, which have the chunks; the color of a box distinguishes a sum from a copy:

    rank 0   ╲                       ╱│1│
    rank 1    ╲│0│     ╲            ╱
    rank 2              ╲│0│       ╱
               │ round 0  │ round 1

Ranks need not be in the same round at the same time: the message of a leaf in its round 0 is received in a round of its
parent that waits for others as well. So steps are drawn (`schedules/rounds.py`). Rows of a lane stand together.

With supernodes both have the costs, of a payload of n bytes: the most that a rank sends in a round, and of that to
another supernode, where links are fewer (swCaffe's figure 7):

    sends    n/2  n/4  n/8
    across   n/2
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple

from unisono.formats import counted, text_table
from unisono.placement import Placement
from unisono.schedules.rounds import begins_of, messages_of, rounds_of
from unisono.schedules.schedule import Action, Algorithm, Program, Transfer
from unisono.view.svg import Place, Span, SpanRow, draw_spans

MEANINGS = {Action.ADD: "summed into place", Action.RECEIVE: "replaces what was there"}

SIGNS = {Action.SEND: ("", "→"), Action.ADD: ("+", "←"), Action.RECEIVE: ("", "←")}
"""Signs before the chunks of a transfer in text, and between them and the peer."""

ARROW = 1.2
"""Least width of the arrows of a step, in boxes."""


def draw(algorithm: Algorithm, ranks: int, name: str = "schedule", placement: Placement | None = None) -> str:
    """Return the schedule of all `ranks` ranks as lines of text, with a table for each lane; with supernodes, costs."""
    programs = [algorithm(rank, ranks) for rank in range(ranks)]
    lines = [f"{name}: {counted(ranks, 'rank')}, {counted(programs[0].chunks, 'chunk')}"]
    for lane in range(len(programs[0].lanes)):
        if len(programs[0].lanes) > 1:
            lines += ["", f"lane {lane}"]
        cells = [[" ".join(map(_cell, transfers)) for transfers in program.lanes[lane]] for program in programs]
        rounds = range(max(map(len, cells)))
        head = ["", *(f"round {index}" for index in rounds)]
        rows = [[f"rank {rank}", *row, *[""] * (len(rounds) - len(row))] for rank, row in enumerate(cells)]
        if placement is not None and placement.supernodes:
            sent = [
                (index, rank, transfer.peer, transfer.span)
                for rank, program in enumerate(programs)
                for index, transfers in enumerate(program.lanes[lane])
                for transfer in transfers
                if transfer.action is Action.SEND
            ]
            costs = [costs_of(sent, index, programs[0].chunks, placement) for index in rounds]
            rows += [[word, *row] for word, row in zip(("sends", "across"), zip(*costs, strict=True), strict=True)]
        lines += text_table([head, *rows], left=range(len(head)))
    return "\n".join(lines)


def costs_of(
    sent: Iterable[tuple[int, int, int, int]], step: int, chunks: int, placement: Placement
) -> tuple[str, str]:
    """Return the most that a rank sends in a step, and to another supernode, as parts of a payload of n bytes.

    `sent` has the step, sender, receiver and number of chunks of each message.
    """
    sends, across = Counter[int](), Counter[int]()
    for message_step, sender, receiver, span in sent:
        if message_step == step:
            sends[sender] += span
            across[sender] += span * (placement.supernode_of(sender) != placement.supernode_of(receiver))
    most, far = (Fraction(max(each.values(), default=0), chunks) for each in (sends, across))
    return _part(most), _part(far)


def _part(share: Fraction) -> str:
    """Return a part of n in words.

    >>> _part(Fraction(1, 2)), _part(Fraction(3, 4)), _part(Fraction(0))
    ('n/2', '3n/4', '')
    """
    times = f"{share.numerator}n" if share.numerator > 1 else "n"
    return (times if share.denominator == 1 else f"{times}/{share.denominator}") if share else ""


def _cell(transfer: Transfer) -> str:
    before, arrow = SIGNS[transfer.action]
    return f"{before}{_chunks(transfer.chunk, transfer.span)}{arrow}{transfer.peer}"


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


def timed_messages(programs: Sequence[Program]) -> list[TimedMessage]:
    """Return all messages of a schedule, by lane and step. Raises ScheduleError if ranks would wait for each other
    forever."""
    messages = messages_of(programs)
    begins = begins_of(programs, messages)
    timed = [
        TimedMessage(start.lane, max(begins[start], begins[stop]), start.rank, stop.rank, chunk, span, action)
        for start, stop, _, (action, _, chunk, span) in messages
    ]
    return sorted(timed, key=lambda message: message[:-1])


def draw_svg(algorithm: Algorithm, ranks: int, name: str = "schedule", placement: Placement | None = None) -> str:
    """Return the schedule of all `ranks` ranks as an SVG document. With a placement, rows name the nodes of ranks."""
    programs = [algorithm(rank, ranks) for rank in range(ranks)]
    messages, lanes = timed_messages(programs), len(programs[0].lanes)
    nodes = placement.node_of_rank if placement and len(placement.nodes) < ranks else ()
    steps, arrows = _steps(messages), list[tuple[Place, Place]]()
    boxes = [dict[tuple[int, str, Action], Span]() for _ in range(lanes * ranks)]
    for message in messages:
        step, first, meaning = steps[message.step], message.lane * ranks, MEANINGS[message.action]
        row = boxes[first + message.receiver]
        if (message.step, message.chunks, message.action) not in row:
            begin = step.boxes + sum(box_step == message.step for box_step, *_ in row)
            box = Span(begin, begin + 1, message.chunks, meaning, f"chunk {message.chunks} {meaning}")
            row[message.step, message.chunks, message.action] = box
        arrows.append((Place(first + message.sender, step.begin), Place(first + message.receiver, step.boxes)))
    heads = [f"node {node}, " for node in nodes] or [""] * ranks
    names = [
        f"lane {lane}, " * (lanes > 1) + f"{heads[rank]}rank {rank}" for lane in range(lanes) for rank in range(ranks)
    ]
    rows = [SpanRow(name, list(row.values())) for name, row in zip(names, boxes, strict=True)]
    unit = "round" if _in_step(messages, programs) else "step"
    marks = [(step.begin, f"{unit} {index}") for index, step in enumerate(steps)]
    if placement is not None and placement.supernodes:
        sent = [(message.step, message.sender, message.receiver, message.span) for message in messages]
        for index, (begin, _) in enumerate(marks):
            sends, across = costs_of(sent, index, programs[0].chunks, placement)
            marks[index] = begin, f"{f'{sends}, ' * (sends != across)}{across} across" if across else sends
    on = f" on {counted(len(set(nodes)), 'node')}" if nodes else ""
    title = f"{name}: {counted(ranks, 'rank')}{on}, {counted(programs[0].chunks, 'chunk')}"
    return draw_spans(rows, title, marks=marks, arrows=arrows)


class _DrawnStep(NamedTuple):
    """Times of a step, in boxes: its arrows begin, they end at the first boxes."""

    begin: float
    boxes: float


def _steps(messages: Sequence[TimedMessage]) -> list[_DrawnStep]:
    """Return the places of the steps. The more messages an end has in a step, the wider are its arrows."""
    steps, begin = list[_DrawnStep](), 0.0
    for step in range(1 + max((message.step for message in messages), default=-1)):
        now = [message for message in messages if message.step == step]
        ends = Counter((m.lane, rank) for m in now for rank in (m.sender, m.receiver))
        boxes = Counter((lane, to) for lane, to, *_ in {(m.lane, m.receiver, m.chunks, m.action) for m in now})
        steps.append(_DrawnStep(begin, begin + ARROW + max(ends.values()) / 4))
        begin = steps[-1].boxes + max(boxes.values())
    return steps


def _in_step(messages: Sequence[TimedMessage], programs: Sequence[Program]) -> bool:
    """Return True if all ranks are in the same round at the same time."""
    ends = {(m.lane, rank, m.step) for m in messages for rank in (m.sender, m.receiver)}
    return ends == {(place.lane, place.rank, place.round) for place in rounds_of(programs)}
