"""Networks that a recipe can name."""

from collections.abc import Callable
from functools import partial

import torch

from unisono.models import (
    alexnet,
    alexnet_bn,
    cd_dnn,
    googlenet,
    inception_bn,
    overfeat_fast,
    resnet50,
    resnet_cifar,
    small_convnet,
    vgg,
)
from unisono.models.catalogue import CIFAR_LAYERS
from unisono.models.own import make_own
from unisono.own import is_own

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
}
"""Networks by name. Each is made from numbers of classes and channels: colour channels of an image, or numbers of an
audio window."""


def make_network(name: str, folder: str, classes: int, channels: int) -> torch.nn.Module:
    """Return the network of that name: one of `MODELS`, or `module:function`, which is looked for in `folder` first.

    Raises RecipeError where a custom network cannot be made.
    """
    return make_own(name, folder, classes, channels) if is_own(name) else MODELS[name](classes, channels)
