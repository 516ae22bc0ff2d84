"""Reads a table of choices and looks a choice up. The format is described at the head of `default.toml`."""

from __future__ import annotations

import tomllib
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from unisono.errors import TableError
from unisono.placement import apart
from unisono.schedules import find, names

COLLECTIVES = ("allreduce", "part_reduce", "part_broadcast")
PLACES = ("one node", "across nodes")
TRANSPORTS = ("windows", "messages")
DEFAULT = Path(__file__).with_name("default.toml")


class Choice(NamedTuple):
    """What carries out a collective: "library", or a schedule on a transport."""

    algorithm: str
    transport: str


class Rows(NamedTuple):
    """The choices of one collective in one place: choice i serves up to limits[i] bytes, the last one the rest."""

    limits: tuple[int, ...]
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class Table:
    """Rows for each (collective, place)."""

    rows: dict[tuple[str, str], Rows]

    def choose(self, collective: str, place: str, nbytes: int) -> Choice:
        """What carries out the collective for a payload of `nbytes`."""
        limits, choices = self.rows[collective, place]
        return choices[bisect_left(limits, nbytes)]


def read_table(path: Path = DEFAULT) -> Table:
    """The table in a file. Raises TableError naming the file, the row and what is wrong with it."""
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TableError(f"{path}: {error}") from error
    return parse_table(content, str(path))


def parse_table(content: dict[str, Any], source: str) -> Table:
    """The table that a parsed TOML file holds; `source` names it in errors."""
    for name in content:
        if name not in COLLECTIVES:
            raise TableError(f"{source}: unknown collective {name!r}; there are {', '.join(COLLECTIVES)}")
    return Table(
        {
            (collective, place): _parse_rows(
                content.get(collective, []), collective, place, f"{source}: {collective}, {place!r}"
            )
            for collective in COLLECTIVES
            for place in PLACES
        }
    )


def _parse_rows(entries: list[dict[str, Any]], collective: str, place: str, where: str) -> Rows:
    limits: list[int] = []
    choices: list[Choice] = []
    for number, entry in enumerate(entries):
        if entry.get("where") not in PLACES:
            raise TableError(f"{where}: row {number}: where = {entry.get('where')!r}; it is one of {', '.join(PLACES)}")
        if entry["where"] != place:
            continue
        if len(choices) > len(limits):
            raise TableError(f"{where}: row {number} comes after the row without up_to, which serves the rest")
        choice = _parse_choice(entry, collective, f"{where}: row {number}")
        if choice.transport == "windows" and place == "across nodes":
            raise TableError(f"{where}: row {number}: windows do not reach across nodes; use messages")
        choices.append(choice)
        if "up_to" in entry:
            up_to = entry["up_to"]
            if not isinstance(up_to, int) or up_to < 0 or (limits and up_to <= limits[-1]):
                raise TableError(
                    f"{where}: row {number}: up_to = {up_to!r}; it is a whole number that grows row by row"
                )
            limits.append(up_to)
    if len(choices) == len(limits):
        raise TableError(f"{where}: a last row without up_to is missing, so the largest sizes have no choice")
    return Rows(tuple(limits), tuple(choices))


def _parse_choice(entry: dict[str, Any], collective: str, where: str) -> Choice:
    unknown = set(entry) - {"where", "up_to", "algorithm", "transport"}
    if unknown:
        raise TableError(f"{where}: unknown key {min(unknown)!r}; there are where, up_to, algorithm, transport")
    algorithm, transport = entry.get("algorithm"), entry.get("transport")
    if algorithm == "library" and transport is None:
        return Choice("library", "library")
    offered = [name for name in names() if getattr(find(name, apart(2)), collective) is not None]
    if algorithm not in offered:
        known = ", ".join(("library", *offered))
        raise TableError(f"{where}: unknown algorithm {algorithm!r}; there are {known}")
    if transport not in TRANSPORTS:
        raise TableError(f"{where}: unknown transport {transport!r}; there are {', '.join(TRANSPORTS)}")
    return Choice(algorithm, transport)
