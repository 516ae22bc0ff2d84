"""The networks that a recipe can name; each is made for a number of classes."""

from collections.abc import Callable

import torch

from unisono.models import small_convnet

MODELS: dict[str, Callable[[int], torch.nn.Module]] = {"small_convnet": small_convnet.SmallConvnet}
