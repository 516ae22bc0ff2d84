"""User-defined functions, named as `module:function` in a recipe.

    [model]
    name = "nets:wide"      # nets.py beside the recipe, in the current folder, or on sys.path

The module is imported when the function is called, not before.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from unisono.errors import RecipeError


def is_user_function(name: str) -> bool:
    """Return True for a name of the form module:function."""
    return ":" in name


@dataclass(frozen=True)
class UserFunction:
    """User-defined function, named in a table of a recipe."""

    table: str
    """Table of the recipe, "model" or "rule": errors name its keys `name` and `folder`."""
    name: str
    folder: str = ""
    what: str = "a network"
    example: str = "nets:wide"
    parameters: str = "classes, channels"
    """Names of the arguments that it is called with."""

    def check(self) -> None:
        """Raise RecipeError if there is no such module. Does not import it."""
        module, spec = self._spec()
        if spec is None:
            raise self._no_module(module)

    def where(self) -> str:
        """Return a description of the module and its location. Does not import it."""
        module, spec = self._spec()
        origin = None if spec is None else spec.origin or next(iter(spec.submodule_search_locations or ()), None)
        keys = f"{self.table}.name = {self.name!r}, {self.table}.folder = {self.folder!r}"
        return f"module {module}, from {origin or 'nowhere'} ({keys})"

    def source(self) -> Path | None:
        """Return the module's file, or the folder of its package; None without one. Does not import it."""
        spec = self._spec()[1]
        origins = () if spec is None else spec.submodule_search_locations or (spec.origin,)
        return next((Path(origin) for origin in origins if origin and Path(origin).exists()), None)

    def call(self, *arguments: object) -> Any:
        """Return the result of the function.

        Python searches `folder` and the current folder first, for the module and for its imports. Raises RecipeError if
        there is no such module or function, or if it does not take the arguments.
        """
        name, word = self._parts()
        with self._search_path():
            try:
                module = importlib.import_module(name)
            except ModuleNotFoundError as error:
                if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                    raise  # the module exists, and one of its imports does not
                raise self._no_module(name) from error
            function = getattr(module, word, None)
            if not callable(function):
                callables = [known for known, value in vars(module).items() if callable(value)]
                near = difflib.get_close_matches(word, callables, n=1)
                hint = f"; did you mean {name}:{near[0]}?" if near else ""
                raise self.error(f"{module.__file__} has no function {word}{hint}")
            try:
                return function(*arguments)
            except TypeError as error:
                if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
                    raise  # the function has raised it
                raise self.error(f"it is called as {word}({self.parameters}), which gives {error}") from error

    def error(self, message: str) -> RecipeError:
        return RecipeError(f"{self.table}.name = {self.name!r}: {message}")

    def _spec(self) -> tuple[str, ModuleSpec | None]:
        """Return the name of the module, and where its package is found."""
        module, _ = self._parts()
        with self._search_path():
            return module, importlib.util.find_spec(module.partition(".")[0])

    def _parts(self) -> tuple[str, str]:
        module, _, function = self.name.partition(":")
        if not all(part.isidentifier() for part in (*module.split("."), function)):
            raise self.error(f"{self.what} is named module:function, for example {self.example}")
        return module, function

    def _no_module(self, module: str) -> RecipeError:
        return self.error(
            f"there is no module {module} in {self.folder or Path.cwd()}, in {Path.cwd()} or on sys.path; "
            f"set {self.table}.folder to its folder"
        )

    @contextmanager
    def _search_path(self) -> Iterator[None]:
        """Search `folder` and the current folder first for imports within the block."""
        folders = [self.folder or str(Path.cwd()), str(Path.cwd())]
        sys.path[:0] = folders
        importlib.invalidate_caches()
        try:
            yield
        finally:
            for folder in folders:
                with suppress(ValueError):  # the function may have changed it too
                    sys.path.remove(folder)
