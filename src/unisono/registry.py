"""Tables of names that are known before their objects are imported: recipes are checked without loading PyTorch.

WIRES = Registry("wire", {"bfloat16": "unisono.wires.rounded:bfloat16"})

list(WIRES)                ["bfloat16"]          nothing is imported
WIRES.load("bfloat16")     what the module has   imported now
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from unisono.errors import UnisonoError, UsageError


class Registry(dict[str, str]):
    """Names of one kind, each with its location, `module:attribute`. An entry is a single row."""

    def __init__(self, kind: str, locations: Mapping[str, str]) -> None:
        super().__init__(locations)
        self.kind = kind

    def check(self, name: str, error: type[UnisonoError] = UsageError) -> None:
        """Raise `error`, listing the known names, for an unknown one."""
        if name not in self:
            raise error(f"there is no {self.kind} {name!r}; there are {', '.join(self)}")

    def load(self, name: str, error: type[UnisonoError] = UsageError) -> Any:
        """Import and return the object called `name`. Raises `error`, listing the known names, for an unknown one."""
        self.check(name, error)
        module, _, attribute = self[name].partition(":")
        return getattr(import_module(module), attribute)


def lazy_attributes(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a package's `__getattr__`, which imports a name from its module when it is first used."""

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    return find
