"""Frozen dataclasses read from tables of keys, as in TOML: types, limits, and the nearest key to an unknown one.

    class Options:                              parse(Options, {"batch": 32}, "a.toml")    Options(batch=32)
        batch: int = number(64, at_least=1)     parse(Options, {"bach": 32}, "a.toml")     ... did you mean batch?

A field whose type is itself such a dataclass is a table.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import field
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from unisono.errors import RecipeError

Value = TypeVar("Value")

MAX_NUMBER = (1 << 63) - 1


def number(default: float, above: float | None = None, at_least: float | None = None) -> Any:
    """Return a dataclass field for a number within limits."""
    return field(default=default, metadata={"above": above, "at_least": at_least})


def numbers(*default: float, at_least: float, below: float) -> Any:
    """Return a dataclass field for as many numbers as the default has, each within limits."""
    return field(default=default, metadata={"at_least": at_least, "below": below})


def choice(default: str, *names: str) -> Any:
    """Return a dataclass field for one of the words in `names`."""
    return field(default=default, metadata={"one_of": names})


def texts_or(word: str) -> Any:
    """Return a dataclass field of type `Mapping[str, str] | str`: a table of keys of any name, or a word in its place.

    Dots may be in the keys. The hash of the dataclass leaves it out: a mapping has none.
    """
    return field(default_factory=dict, hash=False, metadata={"texts_or": word})


def parse(kind: type[Value], content: Mapping[str, Any], source: str, prefix: str = "") -> Value:
    """Return the dataclass of type `kind` that `content` holds; errors name `source` and `prefix`, the table's name.

    Raises RecipeError for an unknown key, a value of another type, or one beyond the limits.
    """
    fields = {entry.name: entry for entry in dataclasses.fields(kind)}  # type: ignore[arg-type]  # a dataclass
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, value in content.items():
        if key not in fields:
            raise RecipeError(f"{source}: unknown key {prefix}{key!s}{_nearest(key, prefix, fields)}")
        if dataclasses.is_dataclass(hints[key]):
            if not isinstance(value, Mapping):
                raise RecipeError(f"{source}: {prefix}{key} is a table of keys, not the value {value!r}")
            values[key] = parse(hints[key], value, source, f"{prefix}{key}.")
        elif (word := fields[key].metadata.get("texts_or")) is not None:
            values[key] = word if value == word else _texts(value, word, f"{source}: {prefix}{key}")
        else:
            values[key] = _value(value, hints[key], fields[key].metadata, f"{source}: {prefix}{key}")
    return kind(**values)


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
    found: dict[str, Any] = {}
    for key, value in content.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def _texts(value: Any, word: str, where: str) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise RecipeError(f'{where} is a table of keys or "{word}", not the value {value!r}')
    found = flat(value)
    for key, text in found.items():
        if not isinstance(text, str):
            raise RecipeError(f"{where}.{key} = {text!r} is not a string")
    return found


def _nearest(key: str, prefix: str, fields: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(key, fields, n=1)
    return (
        f"; did you mean {prefix}{near[0]}?" if near else f"; there are {', '.join(prefix + name for name in fields)}"
    )


def _value(value: Any, kind: type, limits: Mapping[str, Any], where: str) -> Any:
    if get_origin(kind) is tuple:
        return _numbers(value, len(get_args(kind)), limits, where)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        word = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}[kind]
        raise RecipeError(f"{where} = {value!r} is not {word}")
    if isinstance(value, int | float) and not abs(value) <= MAX_NUMBER:
        raise RecipeError(f"{where} = {value!r} is out of range")
    if limits.get("above") is not None and not value > limits["above"]:
        raise RecipeError(f"{where} = {value!r}, but it has to be above {limits['above']}")
    if limits.get("at_least") is not None and not value >= limits["at_least"]:
        raise RecipeError(f"{where} = {value!r}, but it has to be at least {limits['at_least']}")
    if limits.get("one_of") and value not in limits["one_of"]:
        raise RecipeError(f"{where} = {value!r}; it is one of {', '.join(limits['one_of'])}")
    return value


def _numbers(value: Any, count: int, limits: Mapping[str, Any], where: str) -> tuple[float, ...]:
    if not isinstance(value, list | tuple) or len(value) != count:
        raise RecipeError(f"{where} = {value!r} is not a list of {count} numbers")
    found = tuple(_value(one, float, {"at_least": limits["at_least"]}, where) for one in value)
    if too_large := [one for one in found if one >= limits["below"]]:
        raise RecipeError(f"{where} = {too_large[0]!r}, but it has to be below {limits['below']}")
    return found
