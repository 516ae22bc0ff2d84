"""Networks of one's own: `module:function` in a recipe names what makes one, for a number of classes and of channels.

PyTorch is not needed until a network is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.errors import RecipeError
from unisono.models.catalogue import NETWORKS
from unisono.own import Own, is_own

if TYPE_CHECKING:
    import torch


def own_network(name: str, folder: str) -> Own:
    """Return the function that a recipe names, which makes a network."""
    return Own("model", name, folder)


def check_name(name: str, folder: str = "") -> None:
    """Raise RecipeError for a name that is neither in the catalogue nor of a module that is there."""
    if is_own(name):
        own_network(name, folder).check()
    elif name not in NETWORKS:
        raise RecipeError(f"model.name = {name!r}; there are {', '.join(NETWORKS)}, or module:function of your own")


def make_own(name: str, folder: str, classes: int, channels: int) -> torch.nn.Module:
    """Return the network that function(classes, channels) of a module gives.

    Raises RecipeError where there is no such module or function, or where it gives something else.
    """
    import torch  # noqa: PLC0415  it takes a while, and whoever only reads a recipe does not need it

    own = own_network(name, folder)
    network = own.call(classes, channels)
    if not isinstance(network, torch.nn.Module):
        word = name.partition(":")[2]
        raise own.error(f"{word}({classes}, {channels}) gave {type(network).__name__}, not a torch.nn.Module")
    return network
