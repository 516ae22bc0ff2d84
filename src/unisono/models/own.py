"""Custom networks: `module:function` in a recipe names a function that makes one from numbers of classes and channels.

PyTorch is loaded only when a network is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.errors import RecipeError
from unisono.models.catalogue import NETWORKS
from unisono.own import Own, is_own

if TYPE_CHECKING:
    import torch


def own_network(name: str, folder: str) -> Own:
    """Return the reference to a function that makes a network, as named in a recipe."""
    return Own("model", name, folder)


def check_name(name: str, folder: str = "") -> None:
    """Raise RecipeError for a name that is neither in the catalogue nor of an existing module."""
    if is_own(name):
        own_network(name, folder).check()
    elif name not in NETWORKS:
        raise RecipeError(f"model.name = {name!r}; there are {', '.join(NETWORKS)}, or module:function of your own")


def make_own(name: str, folder: str, classes: int, channels: int) -> torch.nn.Module:
    """Return the network that function(classes, channels) of a module makes.

    Raises RecipeError where there is no such module or function, or where its result is not a torch.nn.Module.
    """
    import torch  # noqa: PLC0415  it takes a while, and whoever only reads a recipe does not need it

    own = own_network(name, folder)
    network = own.call(classes, channels)
    if not isinstance(network, torch.nn.Module):
        word = name.partition(":")[2]
        raise own.error(f"{word}({classes}, {channels}) gave {type(network).__name__}, not a torch.nn.Module")
    return network
