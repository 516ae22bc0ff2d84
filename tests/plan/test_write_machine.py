"""A machine that is written is read again as it was."""

from __future__ import annotations

import tomllib
from dataclasses import MISSING, fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.plan.machines import ROWS, TABLES, MachineFacts, find_machine, machine_names, parse_machine
from unisono.plan.write_machine import machine_text

NUMBERS = st.floats(min_value=1e-12, max_value=1e15)
WHOLE = st.integers(min_value=1, max_value=1 << 53)
TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)


def values_of(kind: type[Any], complete: bool) -> st.SearchStrategy[Any]:
    """Instances of a table, which may lack values, or of a row, which lacks none."""
    found = {}
    for one in fields(kind):
        some = {"int": WHOLE, "float": NUMBERS, "str": TEXTS, "tuple[str, ...]": st.lists(TEXTS).map(tuple)}[one.type]
        if one.metadata.get("one_of"):
            some = st.sampled_from(one.metadata["one_of"])
        if one.metadata.get("least") == 0:
            some |= st.just(0.0)
        found[one.name] = some if complete or one.default is MISSING else st.just(one.default) | some
    return st.builds(kind, **found)


@st.composite
def machines(draw: st.DrawFn) -> MachineFacts:
    tables = {name: draw(values_of(kind, complete=False)) for name, kind in TABLES.items()}
    keys = [
        f"{name}.{one.name}"
        for name in TABLES
        for one in fields(TABLES[name])
        if getattr(tables[name], one.name) != one.default
    ]
    reasons = st.dictionaries(st.sampled_from(keys), TEXTS) if keys else st.just({})
    return MachineFacts(
        draw(TEXTS),
        **tables,
        assumed=draw(reasons),
        measured=draw(reasons),
        slow_links=draw(st.dictionaries(st.integers(0, 1000), st.floats(min_value=1, max_value=1e6))),
        **{
            f"{name}s": tuple(draw(st.lists(values_of(kind, complete=True), max_size=2))) for name, kind in ROWS.items()
        },
    )


@given(machines())
def test_any_machine_is_read_as_it_was_written(machine: MachineFacts) -> None:
    text = machine_text(machine)
    assert parse_machine(tomllib.loads(text)) == machine
    assert machine_text(parse_machine(tomllib.loads(text))) == text


@pytest.mark.parametrize("name", machine_names())
def test_machines_of_the_package_are_read_as_they_were_written(name: str) -> None:
    assert parse_machine(tomllib.loads(machine_text(find_machine(name)))) == find_machine(name)


def test_what_is_not_known_is_not_written() -> None:
    assert machine_text(MachineFacts("empty")) == 'name = "empty"\n'
