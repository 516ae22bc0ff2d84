from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.errors import RecipeError
from unisono.tables import change, choice, flat, number, numbers, parse


@dataclass(frozen=True)
class Icing:
    sugar: float = number(0.5, above=0)
    color: str = choice("white", "white", "pink")


@dataclass(frozen=True)
class Cake:
    eggs: int = number(2, at_least=1)
    name: str = "plain"
    icing: Icing = field(default_factory=Icing)
    layers: tuple[float, float] = numbers(0.5, 0.25, at_least=0, below=1)


def test_tables_become_values_and_what_is_not_said_is_as_usual() -> None:
    assert parse(Cake, {}, "nothing") == Cake()
    assert parse(Cake, {"eggs": 3, "icing": {"sugar": 1}}, "cake.toml") == Cake(3, "plain", Icing(1.0))
    assert parse(Cake, {"layers": [0, 0.5]}, "cake.toml").layers == (0.0, 0.5)
    assert isinstance(parse(Cake, {"icing": {"sugar": 1}}, "cake.toml").icing.sugar, float)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"egs": 3}, "cake.toml: unknown key egs; did you mean eggs?"),
        ({"icing": {"zzz": 3}}, "cake.toml: unknown key icing.zzz; there are icing.sugar, icing.color"),
        ({"icing": 3}, "cake.toml: icing is a table of keys, not the value 3"),
        ({"eggs": 0}, "cake.toml: eggs = 0, but it has to be at least 1"),
        ({"eggs": 1.5}, "cake.toml: eggs = 1.5 is not a whole number"),
        ({"eggs": True}, "cake.toml: eggs = True is not a whole number"),
        ({"eggs": 1 << 63}, "is out of range"),
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
def test_what_is_wrong_is_named_with_its_place(content: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse(Cake, content, "cake.toml")
    assert words in str(caught.value)


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


@settings(deadline=None)
@given(content=st.dictionaries(st.sampled_from("abc"), tables))
def test_flat_tables_are_the_same_by_their_dots(content: dict[str, Any]) -> None:
    rebuilt: dict[str, Any] = {}
    for key, value in flat(content).items():
        change(rebuilt, f"{key}={value}")
    assert rebuilt == content
