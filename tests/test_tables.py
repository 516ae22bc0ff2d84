from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import RecipeError, UsageError
from unisono.tables import as_json, change, choice, flat, from_json, known, number, parse, rows


@dataclass(frozen=True)
class Icing:
    sugar: float = number(0.5, above=0)
    color: str = choice("white", "white", "pink")


@dataclass(frozen=True)
class Cake:
    eggs: int = number(2, at_least=1)
    name: str = "plain"
    icing: Icing = field(default_factory=Icing)
    layers: tuple[float, float] = number((0.5, 0.25), at_least=0, below=1)


@dataclass(frozen=True)
class Guest:
    name: str
    seat: int = number(above=0)


@dataclass(frozen=True)
class Party:
    cake: Cake = field(default_factory=Cake)
    songs: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    tables: Mapping[int, float] = field(default_factory=dict, metadata={"at_least": 1})
    anything: Mapping[str, Any] = field(default_factory=dict)
    guests: tuple[Guest, ...] = rows("guest")


PARTY = Party(Cake(3), ("a", "b"), {"cake.eggs": "why"}, {3: 2.0}, {"x": [{"y": 1}]}, (Guest("Ann", 1), Guest("Bo", 2)))
PARTY_TABLES = {
    "cake": {"eggs": 3},
    "songs": ["a", "b"],
    "notes": {"cake.eggs": "why"},
    "tables": {"3": 2.0},
    "anything": {"x": [{"y": 1}]},
    "guest": [{"name": "Ann", "seat": 1}, {"name": "Bo", "seat": 2}],
}


def test_rows_lists_and_tables_of_any_keys() -> None:
    assert parse(Party, PARTY_TABLES, "party.toml") == PARTY
    assert known(PARTY) == PARTY_TABLES
    assert (known(Party()), parse(Party, {}, "party.toml")) == ({}, Party())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (3, "party.toml: the whole is a table of keys, not the value 3"),
        ({"songs": "a"}, "songs = 'a' is not a list of strings"),
        ({"songs": [1]}, "songs = 1 is not a string"),
        ({"notes": {"a": 1}}, 'notes."a" = 1 is not a string'),
        ({"tables": {"x": 2}}, 'tables."x": the key is a whole number from 0, as in "3" = 4.0'),
        ({"tables": {"01": 2}}, 'tables."01": the key is'),
        ({"tables": {"9" * 5000: 2}}, "the key is a whole number from 0"),
        ({"tables": {"1": 0.5}}, 'tables."1" = 0.5, but it has to be at least 1'),
        ({"anything": 3}, "anything is a table of keys, not the value 3"),
        ({"guest": {}}, "guest = {} is not a list of rows; begin each with [[guest]]"),
        ({"guest": [3]}, "guest row 0 is a table of keys, not the value 3"),
        ({"guest": [{"name": "Ann"}]}, "guest row 0.seat is missing; guest row 0 has name, seat"),
        ({"guest": [{"name": "Ann", "seat": 0}]}, "guest row 0.seat = 0, but it has to be above 0"),
        (
            {"guest": [{"name": "Ann", "seat": 1, "sea": 1}]},
            "key guest row 0.sea; did you mean guest row 0.seat?",
        ),
    ],
)
def test_what_is_wrong_in_them_is_an_error_of_the_wanted_type(content: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(Party, content, "party.toml", UsageError)
    assert message in str(caught.value)
    assert caught.type is UsageError


def test_json_is_read_as_it_was_written_with_keys_of_later_releases() -> None:
    assert from_json(Cake, as_json(Cake(3), mass=1.5), "cake.json") == Cake(3)
    assert parse(Cake, {"egs": 3}, "cake.json", strict=False) == Cake()


@pytest.mark.parametrize("content", [b'{"eggs": 1', b"\xff\xfe\x00", b"[" * 100_000])
def test_what_is_not_json(content: bytes) -> None:
    with pytest.raises(UsageError, match=r"cake\.json: not JSON: "):
        from_json(Cake, content, "cake.json")


def test_a_number_of_json_is_a_number() -> None:
    with pytest.raises(UsageError, match=r"cake\.json: icing\.sugar = nan is out of range"):
        from_json(Cake, b'{"icing": {"sugar": NaN}}', "cake.json")


def test_tables_become_values_and_what_is_not_said_is_as_usual() -> None:
    assert parse(Cake, {}, "nothing") == Cake()
    assert parse(Cake, {"eggs": 3, "icing": {"sugar": 1}}, "cake.toml") == Cake(3, "plain", Icing(1.0))
    assert parse(Cake, {"layers": [0, 0.5]}, "cake.toml").layers == (0.0, 0.5)
    assert isinstance(parse(Cake, {"icing": {"sugar": 1}}, "cake.toml").icing.sugar, float)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"egs": 3}, "cake.toml: unknown key egs; did you mean eggs?"),
        ({"icing": {"zzz": 3}}, "cake.toml: unknown key icing.zzz; there are icing.sugar, icing.color"),
        ({"icing": 3}, "cake.toml: icing is a table of keys, not the value 3"),
        ({"eggs": 0}, "cake.toml: eggs = 0, but it has to be at least 1"),
        ({"eggs": 1.5}, "cake.toml: eggs = 1.5 is not a whole number"),
        ({"eggs": True}, "cake.toml: eggs = True is not a whole number"),
        ({"eggs": 1 << 63}, "is out of range"),
        ({"icing": {"sugar": 10**400}}, "is out of range"),
        ({"name": 3}, "cake.toml: name = 3 is not a string"),
        ({"icing": {"sugar": 0}}, "cake.toml: icing.sugar = 0.0, but it has to be above 0"),
        ({"layers": 0.5}, "cake.toml: layers = 0.5 is not a list of 2 numbers"),
        ({"layers": [0.5]}, "cake.toml: layers = [0.5] is not a list of 2 numbers"),
        ({"layers": [0.5, 1]}, "cake.toml: layers = 1.0, but it has to be below 1"),
        ({"layers": [0.5, "a"]}, "cake.toml: layers = 'a' is not a number"),
        ({"layers": [-0.5, 0.5]}, "cake.toml: layers = -0.5, but it has to be at least 0"),
        ({"icing": {"color": "red"}}, "cake.toml: icing.color = 'red'; it is one of white, pink"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(content: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse(Cake, content, "cake.toml")
    assert message in str(caught.value)


def test_changes_make_tables_where_there_are_none() -> None:
    content: dict[str, Any] = {"eggs": 1}
    for wanted in ("eggs = 3", "icing.color=pink", "icing.sugar=0.25", "name=two words"):
        change(content, wanted)
    assert content == {"eggs": 3, "icing": {"color": "pink", "sugar": 0.25}, "name": "two words"}
    with pytest.raises(RecipeError, match=r"--set eggs\.first=3: 'eggs' is a value, not a table"):
        change(content, "eggs.first=3")
    with pytest.raises(RecipeError, match="--set eggs: not of the form key=value"):
        change(content, "eggs")


tables = st.recursive(
    st.integers(), lambda values: st.dictionaries(st.sampled_from("abc"), values, min_size=1), max_leaves=8
)


@given(content=st.dictionaries(st.sampled_from("abc"), tables))
def test_flat_tables_are_the_same_by_their_dots(content: dict[str, Any]) -> None:
    rebuilt: dict[str, Any] = {}
    for key, value in flat(content).items():
        change(rebuilt, f"{key}={value}")
    assert rebuilt == content
