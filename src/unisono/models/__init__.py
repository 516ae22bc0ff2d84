"""Networks, a row each and a file for each family; the user's own, `module:function`, take classes and channels.

PyTorch is loaded only when a network is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.errors import RecipeError
from unisono.registry import Registry
from unisono.user_function import UserFunction, is_user_function

if TYPE_CHECKING:
    import torch

CIFAR_LAYERS = (8, 20, 32, 44, 56, 110)
"""Numbers of layers of the residual networks for small images."""

MODELS = Registry(
    "network",
    {
        "small_convnet": "unisono.models.convnet:small_convnet",
        **{f"resnet{layers}": f"unisono.models.resnet:resnet{layers}" for layers in CIFAR_LAYERS},
        "resnet50_cifar": "unisono.models.resnet:resnet50_cifar",
        "resnet50": "unisono.models.resnet:resnet50",
        "alexnet": "unisono.models.convnet:alexnet",
        "alexnet_bn": "unisono.models.convnet:alexnet_bn",
        "overfeat_fast": "unisono.models.convnet:overfeat_fast",
        "vgg_a": "unisono.models.convnet:vgg_a",
        "vgg16": "unisono.models.convnet:vgg16",
        "vgg19": "unisono.models.convnet:vgg19",
        "googlenet": "unisono.models.inception:GoogLeNet",
        "googlenet_bn": "unisono.models.inception:googlenet_bn",
        "googlenet_bn_torch": "unisono.models.inception:TorchGoogLeNet",
        "inception_bn": "unisono.models.inception:InceptionBN",
        "cd_dnn": "unisono.models.convnet:CDDNN",
        "gpt_small": "unisono.models.gpt_small:GPTSmall",
    },
)
"""Networks that a recipe can name. Each is made from numbers of classes and channels: colour channels of an image,
numbers of an audio window, or tokens of a window of text."""

SHAPES = {
    "overfeat_fast": (3, 231, 231),
    "small_convnet": (1, 8, 8),
    **{f"resnet{layers}": (3, 32, 32) for layers in CIFAR_LAYERS},
    "resnet50_cifar": (3, 32, 32),
    "cd_dnn": (440,),
    "gpt_small": (128,),
}
"""Shape of a sample, for networks that do not take images of 224 x 224."""


def input_shape(name: str, size: int = 0) -> tuple[int, ...]:
    """Return the shape of a network's samples, as in its paper, or with images of `size` x `size` pixels."""
    shape = SHAPES.get(name, (3, 224, 224))
    return (shape[0], size, size) if size and len(shape) > 1 else shape


def check_name(name: str, folder: str = "") -> None:
    """Raise RecipeError for a name that is neither in MODELS nor of an existing module."""
    if is_user_function(name):
        UserFunction("model", name, folder).check()
    elif name not in MODELS:
        raise RecipeError(f"model.name = {name!r}; there are {', '.join(MODELS)}, or module:function of your own")


def make_network(name: str, folder: str, classes: int, channels: int) -> torch.nn.Module:
    """Return the network of that name: one of `MODELS`, or `module:function`, which is searched in `folder` first.

    Raises RecipeError where there is no such module or function, or where its result is not a torch.nn.Module.
    """
    if not is_user_function(name):
        network: torch.nn.Module = MODELS.load(name)(classes, channels)
        return network
    import torch  # noqa: PLC0415  slow to import, and not needed to read a recipe

    function = UserFunction("model", name, folder)
    returned = function.call(classes, channels)
    if not isinstance(returned, torch.nn.Module):
        word = name.partition(":")[2]
        raise function.error(f"{word}({classes}, {channels}) returned {type(returned).__name__}, not a torch.nn.Module")
    return returned
