"""Recipes that come with the package: `unisono train digits` finds one by its name."""

from __future__ import annotations

import difflib
from pathlib import Path

from unisono.errors import RecipeError

FOLDER = Path(__file__).parents[1] / "recipes"


def names() -> list[str]:
    """Return the names of the package's recipes."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def find_recipe(path: Path) -> Path:
    """Return the file of a recipe: `path` if it is one, else the package's recipe of that name.

    Raises RecipeError, with the nearest name or all of them, for a bare name that is neither.
    """
    if path.is_file() or path.suffix or path.parent != Path():
        return path
    packaged = FOLDER / f"{path}.toml"
    if not packaged.exists():
        near = difflib.get_close_matches(str(path), names(), n=1)
        hint = f"did you mean {near[0]}?" if near else f"it is neither a file nor one of {', '.join(names())}"
        raise RecipeError(f"no recipe {path}: {hint}")
    return packaged
