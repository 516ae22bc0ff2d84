"""Networks of one's own: `module:function` in a recipe names what makes one, for a number of classes and of channels.

    [model]
    name = "nets:wide"      # nets.py where the recipe is, in the current folder, or wherever else Python looks

PyTorch is not needed until a network is made.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.errors import RecipeError
from unisono.models.catalogue import NETWORKS

if TYPE_CHECKING:
    import torch


def is_own(name: str) -> bool:
    """Whether a network's name is of the form module:function."""
    return ":" in name


def check_name(name: str, folder: str = "") -> None:
    """Raise RecipeError for a name that is neither in the catalogue nor of a module that is there."""
    if is_own(name):
        check_own(name, folder)
    elif name not in NETWORKS:
        raise RecipeError(f"model.name = {name!r}; there are {', '.join(NETWORKS)}, or module:function of your own")


def check_own(name: str, folder: str) -> None:
    """Raise RecipeError where there is no such module: it is looked for, and nothing of it is run."""
    module, _ = _parts(name)
    with _looked_in(folder):
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            raise _no_module(name, module, folder)


def where_own(name: str, folder: str) -> str:
    """Return what to say of the module and where it lies, as Python finds it; nothing of it is run."""
    module, _ = _parts(name)
    with _looked_in(folder):
        found = importlib.util.find_spec(module.partition(".")[0])
    origin = None if found is None else found.origin or next(iter(found.submodule_search_locations or ()), None)
    return f"module {module}, from {origin or 'nowhere'} (model.name = {name!r}, model.folder = {folder!r})"


def make_own(name: str, folder: str, classes: int, channels: int) -> torch.nn.Module:
    """The network that function(classes, channels) of a module gives.

    `folder` and the current folder are where Python looks first, for the module and for what it imports meanwhile.
    Raises RecipeError where there is no such module or function, or where it gives something else.
    """
    import torch  # noqa: PLC0415  it takes a while, and whoever only reads a recipe does not need it

    place, word = _parts(name)
    with _looked_in(folder):
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise  # it is there, and imports something that is not
            raise _no_module(name, place, folder) from error
        function = getattr(module, word, None)
        if not callable(function):
            near = difflib.get_close_matches(word, [one for one in vars(module) if callable(getattr(module, one))], n=1)
            hint = f"; did you mean {place}:{near[0]}?" if near else ""
            raise RecipeError(f"model.name = {name!r}: {module.__file__} has no function {word}{hint}")
        network = function(classes, channels)
    if not isinstance(network, torch.nn.Module):
        raise RecipeError(
            f"model.name = {name!r}: {word}({classes}, {channels}) gave {type(network).__name__}, not a torch.nn.Module"
        )
    return network


def _parts(name: str) -> tuple[str, str]:
    """The module and the function."""
    module, _, function = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), function)):
        raise RecipeError(f"model.name = {name!r}: a network of your own is named module:function, as in nets:wide")
    return module, function


def _no_module(name: str, module: str, folder: str) -> RecipeError:
    return RecipeError(
        f"model.name = {name!r}: there is no module {module} in {folder or Path.cwd()}, in {Path.cwd()} or where else "
        "Python looks; model.folder says where it is"
    )


@contextmanager
def _looked_in(folder: str) -> Iterator[None]:
    """Within the block Python looks there first, and in the current folder."""
    places = [folder or str(Path.cwd()), str(Path.cwd())]
    sys.path[:0] = places
    importlib.invalidate_caches()
    try:
        yield
    finally:
        for place in places:
            with suppress(ValueError):  # what was run may have changed it too
                sys.path.remove(place)
