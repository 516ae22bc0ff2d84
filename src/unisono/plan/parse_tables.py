"""Tables and rows of a TOML file as dataclasses: keys, types and ranges are checked, errors are one line.

    [node]          cores = 2            ─ parse_table ─▶ NodeFacts(cores=2): keys may be missing
    [[message]]     bytes = 4, ...       ─ parse_rows ──▶ (MessageRow(4, ...), ...): every key is there

Numbers are above 0, or not below a field's `least`; texts are not empty, and one of a field's `one_of`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Any

from unisono.errors import UsageError


def parse_table(table: str, kind: type[Any], values: Any) -> Any:
    """Return the dataclass `kind` of a table's values; missing keys have their defaults.

    Raises UsageError for a key or a value that the table cannot have.
    """
    known = {one.name: one for one in fields(kind)}
    if not isinstance(values, Mapping):
        raise UsageError(f"{table} = {values!r}; it is a table of {', '.join(known)}")
    if unknown := [key for key in values if key not in known]:
        raise UsageError(f"{table}.{unknown[0]} is not one of {', '.join(known)}")
    return kind(**{key: _parse_value(f"{table}.{key}", known[key], value) for key, value in values.items()})


def parse_rows(name: str, kind: type[Any], rows: Any) -> tuple[Any, ...]:
    """Return the dataclasses `kind` of a list of tables, none of which lacks a key.

    Raises UsageError for anything else, naming the row by its number.
    """
    if not isinstance(rows, list):
        raise UsageError(f"{name} = {rows!r}; it is a list of rows: begin each with [[{name}]]")
    known = [one.name for one in fields(kind)]
    for number, row in enumerate(rows):
        if isinstance(row, Mapping) and (missing := [key for key in known if key not in row]):
            raise UsageError(f"{name} row {number} has no {missing[0]}; it has {', '.join(known)}")
    return tuple(parse_table(f"{name} row {number}", kind, row) for number, row in enumerate(rows))


def parse_factors(table: str, values: Any) -> dict[int, float]:
    """Return factors of 1 or more by the number of a node. Raises UsageError for anything else."""
    if not isinstance(values, Mapping):
        raise UsageError(f'{table} = {values!r}; it is a table of factors by node: "3" = 4.0')
    for key, value in values.items():
        if not (key.isascii() and key.isdecimal() and key == str(int(key))):
            raise UsageError(f'{table}."{key}": a node is a number from 0, as in "3" = 4.0')
        if not _is_number(value) or not 1 <= value < float("inf"):
            raise UsageError(f'{table}."{key}" = {value!r}; it is a factor of 1 or more')
    return {int(key): float(value) for key, value in values.items()}


def _parse_value(name: str, field: Field[Any], value: Any) -> Any:
    if field.type == "str":
        allowed = field.metadata.get("one_of")
        if not isinstance(value, str) or not value or (allowed and value not in allowed):
            raise UsageError(f"{name} = {value!r}; it is {'one of ' + ', '.join(allowed) if allowed else 'text'}")
        return value
    if field.type == "tuple[str, ...]":
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise UsageError(f"{name} = {value!r}; it is a list of texts")
        return tuple(value)
    wanted = {"int": int, "float": float}[str(field.type)]
    least = field.metadata.get("least")
    fits = isinstance(value, int) if wanted is int else True
    if not (_is_number(value) and fits and (value > 0 or value == least) and value < float("inf")):
        limit = "above 0" if least is None else f"of {least:g} or more"
        raise UsageError(f"{name} = {value!r}; it is a {'whole ' if wanted is int else ''}number {limit}")
    return wanted(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
