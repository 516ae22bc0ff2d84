"""The package's recipes are found by name; a file of that name comes first."""

from __future__ import annotations

from pathlib import Path

import pytest

from unisono.errors import RecipeError
from unisono.training.packaged_recipes import FOLDER, find_recipe, names
from unisono.training.recipe_file import read_recipe


def test_every_recipe_of_the_package_is_found_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "digits" in names()
    for name in names():
        assert find_recipe(Path(name)) == FOLDER / f"{name}.toml"
        assert read_recipe(find_recipe(Path(name))).name == name


def test_a_file_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()  # a data set, perhaps
    assert find_recipe(Path("digits")) == FOLDER / "digits.toml"
    (tmp_path / "digits").rmdir()
    (tmp_path / "digits").write_text("")
    assert find_recipe(Path("digits")) == Path("digits")
    assert find_recipe(Path("digits.toml")) == Path("digits.toml")
    assert find_recipe(Path("below/digits")) == Path("below/digits")


def test_an_unknown_name_brings_the_nearest_or_all_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=r"^no recipe digit: did you mean digits\?$"):
        find_recipe(Path("digit"))
    with pytest.raises(RecipeError, match=r"no recipe mine: it is neither a file nor one of .*digits"):
        find_recipe(Path("mine"))
