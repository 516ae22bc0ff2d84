"""Functions of the user, which a recipe names as `module:function`.

    [model]
    name = "nets:wide"      # nets.py where the recipe is, in the current folder, or wherever else Python looks

None of the module's code is run before the function is called.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.errors import RecipeError


def is_own(name: str) -> bool:
    """Return True for a name of the form module:function."""
    return ":" in name


@dataclass(frozen=True)
class Own:
    """Function that a table of a recipe names."""

    table: str
    """Table of the recipe, "model" or "rule": errors name its keys `name` and `folder`."""
    name: str
    folder: str = ""
    what: str = "a network"
    example: str = "nets:wide"

    def check(self) -> None:
        """Raise RecipeError if there is no such module: it is searched for, but none of its code is run."""
        module, _ = self._parts()
        with self._looked_in():
            if importlib.util.find_spec(module.partition(".")[0]) is None:
                raise self._no_module(module)

    def where(self) -> str:
        """Return a description of the module and its location, as Python finds it; none of its code is run."""
        module, _ = self._parts()
        with self._looked_in():
            found = importlib.util.find_spec(module.partition(".")[0])
        origin = None if found is None else found.origin or next(iter(found.submodule_search_locations or ()), None)
        said = f"{self.table}.name = {self.name!r}, {self.table}.folder = {self.folder!r}"
        return f"module {module}, from {origin or 'nowhere'} ({said})"

    def call(self, *arguments: object) -> Any:
        """Return the result of the function.

        Python searches `folder` and the current folder first, for the module and for its imports meanwhile. Raises
        RecipeError where there is no such module or function.
        """
        place, word = self._parts()
        with self._looked_in():
            try:
                module = importlib.import_module(place)
            except ModuleNotFoundError as error:
                if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                    raise  # it is there, and imports something that is not
                raise self._no_module(place) from error
            function = getattr(module, word, None)
            if not callable(function):
                callables = [one for one in vars(module) if callable(getattr(module, one))]
                near = difflib.get_close_matches(word, callables, n=1)
                hint = f"; did you mean {place}:{near[0]}?" if near else ""
                raise self.error(f"{module.__file__} has no function {word}{hint}")
            return function(*arguments)

    def error(self, words: str) -> RecipeError:
        """Return an error that names the key."""
        return RecipeError(f"{self.table}.name = {self.name!r}: {words}")

    def _parts(self) -> tuple[str, str]:
        module, _, function = self.name.partition(":")
        if not all(part.isidentifier() for part in (*module.split("."), function)):
            raise self.error(f"{self.what} of your own is named module:function, as in {self.example}")
        return module, function

    def _no_module(self, module: str) -> RecipeError:
        return self.error(
            f"there is no module {module} in {self.folder or Path.cwd()}, in {Path.cwd()} or where else "
            f"Python looks; {self.table}.folder says where it is"
        )

    @contextmanager
    def _looked_in(self) -> Iterator[None]:
        """Search `folder` and the current folder first for imports within the block."""
        places = [self.folder or str(Path.cwd()), str(Path.cwd())]
        sys.path[:0] = places
        importlib.invalidate_caches()
        try:
            yield
        finally:
            for place in places:
                with suppress(ValueError):  # what was run may have changed it too
                    sys.path.remove(place)
