"""Frozen dataclasses read from tables of keys, TOML or JSON: types, limits, and the nearest key to an unknown one.

    class Options:                              parse(Options, {"batch": 32}, "a.toml")    Options(batch=32)
        batch: int = number(64, at_least=1)     parse(Options, {"bach": 32}, "a.toml")     ... did you mean batch?

    type of a field            its form in the table
    bool, int, float, str      a value; a whole number will do for a float; of several types, the first
    another such dataclass     a table
    tuple[Row, ...]            rows, each a table of the dataclass Row
    tuple[float, float]        a list of as many numbers
    tuple[str, ...]            a list of strings
    tuple[tuple[str, int],...] a list of such lists
    Mapping[str, str]          a table of strings by keys of any name, also with dots
    Mapping[int, float]        a table of numbers by whole numbers from 0
    Mapping[str, Any]          a table of any form

A field without a default has to be there.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import operator
import reprlib
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, field
from functools import lru_cache
from numbers import Integral, Real
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from unisono.errors import RecipeError, UsageError

Value = TypeVar("Value")

MAX_NUMBER = (1 << 63) - 1

types_of = lru_cache(maxsize=256)(get_type_hints)
"""Types of a dataclass's fields, by their names."""

LIMITS = {
    "above": ("above", operator.gt),
    "at_least": ("at least", operator.ge),
    "at_most": ("at most", operator.le),
    "below": ("below", operator.lt),
}
"""Limits of a number: their names in a field, their words, and the comparison that holds within them."""


def number(default: Any = MISSING, **limits: float) -> Any:
    """Return a dataclass field for a number within LIMITS; each number in a list or a table of them."""
    return field(default=default, metadata=limits)


def choice(default: str, *names: str) -> Any:
    """Return a dataclass field for one of the words in `names`."""
    return field(default=default, metadata={"one_of": names})


def rows(key: str) -> Any:
    """Return a dataclass field of type `tuple[Row, ...]`, whose rows are tables with the heading [[key]]."""
    return field(default=(), metadata={"key": key})


def texts_or(word: str) -> Any:
    """Return a dataclass field of type `Mapping[str, str] | str`: a table of keys of any name, or a word in its place.

    Dots may be in the keys. The hash of the dataclass leaves it out: a mapping has none.
    """
    return field(default_factory=dict, hash=False, metadata={"texts_or": word})


def parse(
    kind: type[Value],
    content: Any,
    source: str,
    error: type[UsageError] = RecipeError,
    strict: bool = True,
    name: str = "",
) -> Value:
    """Return the dataclass of type `kind` that `content` holds; errors name `source` and the key, with its tables.

    `name` is that of the table itself, where it is in another.

    Raises `error` for a key that is missing, a value of another type, or one beyond the limits; and for an unknown key,
    unless files of later releases, which may have more, are read as well: not `strict`.
    """
    try:
        value: Value = _dataclass(kind, content, name, strict)
    except _UnfitError as unfit:
        raise error(f"{source}: {unfit}") from None
    return value


def check(value: Any) -> None:
    """Raise UsageError if a number or a word of a dataclass that was made in Python does not fit, as `parse` does."""
    kind: Any = type(value)
    for each in dataclasses.fields(value):
        if each.metadata and (held := getattr(value, each.name)) != each.default:
            if isinstance(held, Real) and not isinstance(held, bool):  # also NumPy's
                held = int(held) if isinstance(held, Integral) else float(held)
            try:
                _parsed(types_of(kind)[each.name], held, f"{kind.__name__}: {each.name}", each.metadata, True)
            except _UnfitError as unfit:
                raise UsageError(str(unfit)) from None


def known(value: Any) -> dict[str, Any]:
    """Return the table of a dataclass, as `parse` reads it, without keys whose values are the defaults."""
    table = {}
    for each in dataclasses.fields(value):
        held = getattr(value, each.name)
        if held != (each.default if each.default_factory is MISSING else each.default_factory()):
            table[_key(each)] = _plain(held)
    return table


def as_json(value: Any, **derived: Any) -> bytes:
    """Return a dataclass as a JSON file with sorted keys; `derived` are keys beside its own."""
    data = {**dataclasses.asdict(value), **derived}
    return json.dumps(data, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"


def from_json(kind: type[Value], content: bytes, source: str) -> Value:
    """Return the dataclass of type `kind` in a JSON file, which may have further keys.

    Raises UsageError naming `source`, and the key as `parse`.
    """
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{source}: not JSON: {error}") from error
    return parse(kind, data, source, UsageError, strict=False)


def change(content: dict[str, Any], wanted: str) -> None:
    """Apply a change of the form key=value (`training.epochs=3`) to tables, in place. Raises RecipeError naming it."""
    key, equals, text = wanted.partition("=")
    if not equals or not key.strip():
        raise RecipeError(f"--set {wanted}: not of the form key=value, as in training.epochs=3")
    *tables, last = (part.strip() for part in key.split("."))
    for table in tables:
        content = content.setdefault(table, {})
        if not isinstance(content, dict):
            raise RecipeError(f"--set {wanted}: {table!r} is a value, not a table")
    try:
        content[last] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        content[last] = text.strip()  # a word without quotes


def flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one table, with dots in its keys."""
    values: dict[str, Any] = {}
    for key, value in content.items():
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return values


class _UnfitError(Exception):
    """Sentence about a key or a value that does not fit."""


def _key(field: dataclasses.Field[Any]) -> str:
    return str(field.metadata.get("key", field.name))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return known(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(held) for key, held in value.items()}
    return [_plain(held) for held in value] if isinstance(value, list | tuple) else value


def _dataclass(kind: Any, content: Any, name: str, strict: bool) -> Any:
    content, prefix = _table(content, name), f"{name}." if name else ""
    fields, hints = {_key(each): each for each in dataclasses.fields(kind)}, types_of(kind)
    for key in content if strict else ():
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            keys = ", ".join(f"{prefix}{known}" for known in near or fields)
            hint = f"did you mean {keys}?" if near else f"there are {keys}"
            raise _UnfitError(f"unknown key {prefix}{key}; {hint}")
    values: dict[str, Any] = {}
    for key, each in fields.items():
        if key in content:
            values[each.name] = _parsed(hints[each.name], content[key], f"{prefix}{key}", each.metadata, strict)
        elif each.default is MISSING and each.default_factory is MISSING:
            raise _UnfitError(f"{prefix}{key} is missing; {name or 'the whole'} has {', '.join(fields)}")
    try:
        return kind(**values)
    except UsageError as error:  # a check of the dataclass itself
        raise _UnfitError(f"{name}: {error}" if name else str(error)) from error


def _parsed(kind: Any, value: Any, name: str, limits: Mapping[str, Any], strict: bool) -> Any:
    kind = get_args(kind)[0] if get_origin(kind) in (Union, UnionType) and "texts_or" not in limits else kind
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, value, name, strict)
    if (word := limits.get("texts_or")) is not None:
        if value == word:
            return word
        texts = flat(_table(value, name, f' or "{word}"'))
        return {key: _value(text, str, f"{name}.{key}", {}) for key, text in texts.items()}
    if get_origin(kind) is Mapping:
        return _mapping(get_args(kind), value, name, limits)
    if get_origin(kind) is tuple:
        return _tuple(get_args(kind), value, name, limits, strict)
    return _value(value, kind, name, limits)


def _mapping(kinds: tuple[Any, ...], value: Any, name: str, limits: Mapping[str, Any]) -> Mapping[Any, Any]:
    (keys, values), table = kinds, _table(value, name)
    if values is Any:
        return table
    parse_key = _whole_number if keys is int else lambda key, _: key
    return {parse_key(key, name): _value(held, values, f'{name}."{key}"', limits) for key, held in table.items()}


def _tuple(kinds: tuple[Any, ...], value: Any, name: str, limits: Mapping[str, Any], strict: bool) -> tuple[Any, ...]:
    count = None if kinds[-1] is ... else len(kinds)
    if not isinstance(value, list | tuple) or len(value) != (count or len(value)):
        rows = f"rows; begin each with [[{name}]]" if dataclasses.is_dataclass(kinds[0]) else "strings"
        form = f"{count} {'numbers' if kinds[0] is float else 'values'}" if count else rows
        raise _UnfitError(f"{name} = {value!r} is not a list of {form}")
    if dataclasses.is_dataclass(kinds[0]):
        return tuple(_dataclass(kinds[0], row, f"{name} row {index}", strict) for index, row in enumerate(value))
    each = kinds if count else [kinds[0]] * len(value)
    return tuple(_parsed(kind, held, name, limits, strict) for kind, held in zip(each, value, strict=True))


def _table(value: Any, name: str, or_word: str = "") -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        expected = f"a table of keys{or_word}, not the value {reprlib.repr(value)}"
        raise _UnfitError(f"{name or 'the whole'} is {expected}")
    return value


def _whole_number(key: str, name: str) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) < 19 and key == str(int(key))):
        raise _UnfitError(f'{name}."{key}": the key is a whole number from 0, as in "3" = 4.0')
    return int(key)


def _value(value: Any, kind: type, name: str, limits: Mapping[str, Any]) -> Any:
    if limits.get("or_number") and type(value) is int:  # a text such as 3x4 may be a number alone
        value = str(value)
    fits = isinstance(value, float | int) if kind is float else isinstance(value, kind)
    if not fits or (isinstance(value, bool) and kind is not bool):
        word = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}[kind]
        raise _UnfitError(f"{name} = {value!r} is not {word}")
    if isinstance(value, int | float) and not abs(value) <= MAX_NUMBER:
        raise _UnfitError(f"{name} = {value!r} is out of range")
    value = float(value) if kind is float else value
    for limit, (relation, fits_in) in LIMITS.items():
        if limits.get(limit) is not None and not fits_in(value, limits[limit]):
            raise _UnfitError(f"{name} = {value!r}, but it has to be {relation} {limits[limit]}")
    if limits.get("one_of") and value not in limits["one_of"]:
        raise _UnfitError(f"{name} = {value!r}; it is one of {', '.join(limits['one_of'])}")
    return value
