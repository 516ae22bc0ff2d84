"""Networks that a recipe can name."""

from collections.abc import Callable
from functools import partial

import torch

from unisono.models import (
    alexnet,
    alexnet_bn,
    cd_dnn,
    googlenet,
    gpt_small,
    inception_bn,
    overfeat_fast,
    resnet50,
    resnet_cifar,
    small_convnet,
    vgg,
)
from unisono.models.names import CIFAR_LAYERS
from unisono.models.user_network import make_user_network
from unisono.user_function import is_user_function

MODELS: dict[str, Callable[[int, int], torch.nn.Module]] = {
    "small_convnet": small_convnet.SmallConvnet,
    **{f"resnet{layers}": partial(resnet_cifar.resnet_cifar, layers) for layers in CIFAR_LAYERS},
    "resnet50": resnet50.ResNet50,
    "alexnet": alexnet.AlexNet,
    "alexnet_bn": alexnet_bn.AlexNetBN,
    "overfeat_fast": overfeat_fast.OverFeatFast,
    "vgg_a": vgg.vgg_a,
    "vgg16": vgg.vgg16,
    "vgg19": vgg.vgg19,
    "googlenet": googlenet.GoogLeNet,
    "googlenet_bn": googlenet.googlenet_bn,
    "inception_bn": inception_bn.InceptionBN,
    "cd_dnn": cd_dnn.CDDNN,
    "gpt_small": gpt_small.GPTSmall,
}
"""Networks by name. Each is made from numbers of classes and channels: colour channels of an image, numbers of an
audio window, or tokens of a window of text."""


def make_network(name: str, folder: str, classes: int, channels: int) -> torch.nn.Module:
    """Return the network of that name: one of `MODELS`, or `module:function`, which is searched in `folder` first.

    Raises RecipeError if a user-defined network cannot be made.
    """
    return (
        make_user_network(name, folder, classes, channels)
        if is_user_function(name)
        else MODELS[name](classes, channels)
    )
