"""JSON form of frozen dataclasses: written whole, and read with a check of each key.

    LedgerEntry(...) ─ as_json ─▶ b'{"labels": {...}, ...}' ─ from_json ─▶ LedgerEntry(...)

Keys that a dataclass does not have are ignored: a later release may have written them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from math import isfinite
from typing import Any, TypeVar, get_origin, get_type_hints

from unisono.errors import UsageError

Kind = TypeVar("Kind")


def as_json(value: Any, **derived: Any) -> bytes:
    """Return a dataclass as a JSON file with sorted keys; `derived` are keys beside its own."""
    return json.dumps({**asdict(value), **derived}, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"


def from_json(kind: type[Kind], content: bytes) -> Kind:
    """Return the dataclass of this kind. Raises UsageError, naming the key, for content that does not describe one."""
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not JSON: {error}") from error
    return from_data(kind, data)


def from_data(kind: type[Kind], data: Any, key: str = "") -> Kind:
    """Return the dataclass of this kind from JSON data, which is that of `key`. Raises UsageError as `from_json`."""
    if not isinstance(data, Mapping):
        raise UsageError(f"{key or 'the whole'} is {type(data).__name__}, not a table")
    hints, found, inside = get_type_hints(kind), {}, f"{key}." if key else ""
    for one in fields(kind):  # type: ignore[arg-type]  # a dataclass
        if one.name in data:
            found[one.name] = _value(hints[one.name], data[one.name], f"{inside}{one.name}")
        elif one.default is MISSING and one.default_factory is MISSING:
            raise UsageError(f"{inside}{one.name} is missing")
    return kind(**found)


def _value(hint: Any, value: Any, key: str) -> Any:
    if is_dataclass(hint):
        return from_data(hint, value, key)  # type: ignore[arg-type]  # hints name classes
    if get_origin(hint) is Mapping:
        if isinstance(value, Mapping) and all(isinstance(one, str) for one in value.values()):
            return dict(value)
        raise UsageError(f"{key} = {value!r}; it is a table of texts")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if hint is float and number and isfinite(value):
        return float(value)
    if hint is not float and type(value) is hint:
        return value
    raise UsageError(f"{key} = {value!r}; it is {_WORDS[hint]}")


_WORDS: Mapping[Any, str] = {float: "a number", int: "a whole number", str: "text"}
