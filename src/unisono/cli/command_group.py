"""Group of commands whose help shows a flag without a type: it takes no value."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand, TyperGroup, TyperOption


class CommandGroup(TyperGroup):
    """Group of commands; in its help and theirs, flags have no `<bool>` beside them."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options of the group itself."""
        return _without_types(super().get_params(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of this name, or None."""
        found = super().get_command(ctx, cmd_name)
        if isinstance(found, TyperCommand):
            _without_types(found.get_params(ctx))
        return found


def _without_types(parameters: Iterable[Any]) -> list[Any]:
    """Return the parameters; flags among them are shown without a type from here on."""
    found = list(parameters)
    for one in found:
        if isinstance(one, TyperOption) and one.is_flag:
            one.metavar = ""
    return found
