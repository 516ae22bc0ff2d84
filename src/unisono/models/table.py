"""The networks that a recipe can name."""

from collections.abc import Callable

import torch

from unisono.models import alexnet_bn, resnet50, resnet_cifar, small_convnet

MODELS: dict[str, Callable[[int, int], torch.nn.Module]] = {
    "small_convnet": small_convnet.SmallConvnet,
    "resnet20": resnet_cifar.resnet20,
    "alexnet_bn": alexnet_bn.AlexNetBN,
    "resnet50": resnet50.ResNet50,
}
"""Each is made for a number of classes and of colours."""
