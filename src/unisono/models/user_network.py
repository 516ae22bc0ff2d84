"""User-defined networks: `module:function` in a recipe, a function of the numbers of classes and channels.

PyTorch is loaded only when a network is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.errors import RecipeError
from unisono.models.names import NETWORKS
from unisono.user_function import UserFunction, is_user_function

if TYPE_CHECKING:
    import torch


def user_network(name: str, folder: str) -> UserFunction:
    """Return the reference to a function that makes a network, as named in a recipe."""
    return UserFunction("model", name, folder)


def check_name(name: str, folder: str = "") -> None:
    """Raise RecipeError for a name that is neither in NETWORKS nor of an existing module."""
    if is_user_function(name):
        user_network(name, folder).check()
    elif name not in NETWORKS:
        raise RecipeError(f"model.name = {name!r}; there are {', '.join(NETWORKS)}, or module:function of your own")


def make_user_network(name: str, folder: str, classes: int, channels: int) -> torch.nn.Module:
    """Return the network that function(classes, channels) of a module makes.

    Raises RecipeError where there is no such module or function, or where its result is not a torch.nn.Module.
    """
    import torch  # noqa: PLC0415  slow to import, and not needed to read a recipe

    function = user_network(name, folder)
    network = function.call(classes, channels)
    if not isinstance(network, torch.nn.Module):
        word = name.partition(":")[2]
        raise function.error(f"{word}({classes}, {channels}) returned {type(network).__name__}, not a torch.nn.Module")
    return network
