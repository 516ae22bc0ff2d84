"""Drawing of a schedule as text: a row for each rank, a column for each round.

2→1      chunk 2 is sent to rank 1
+0←3     chunk 0 from rank 3 is summed into place
0←3      chunk 0 from rank 3 replaces what was there
4-7→1    chunks 4 to 7 in one message
"""

from __future__ import annotations

from unisono.schedules.schedule import Action, Algorithm, Transfer


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
    last = transfer.chunk + transfer.span - 1
    chunks = f"{transfer.chunk}" if transfer.span == 1 else f"{transfer.chunk}-{last}"
    match transfer.action:
        case Action.SEND:
            return f"{chunks}→{transfer.peer}"
        case Action.RECEIVE:
            return f"{chunks}←{transfer.peer}"
        case Action.ADD:
            return f"+{chunks}←{transfer.peer}"
