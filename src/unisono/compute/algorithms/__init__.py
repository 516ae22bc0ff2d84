"""Convolution algorithms by name. The first is PyTorch's own, which can compute any layer."""

from __future__ import annotations

from unisono.compute.algorithms.library import CHANNELS_FIRST, CHANNELS_LAST
from unisono.compute.algorithms.product import PRODUCT
from unisono.compute.algorithms.shifted import SHIFTED
from unisono.compute.algorithms.unfolded import UNFOLDED
from unisono.compute.algorithms.winograd import WINOGRAD
from unisono.compute.geometry import ConvolutionAlgorithm

DEFAULT = "library, channels last"

ALGORITHMS: dict[str, ConvolutionAlgorithm] = {
    DEFAULT: CHANNELS_LAST,
    "library, channels first": CHANNELS_FIRST,
    "product": PRODUCT,
    "unfolded": UNFOLDED,
    "shifted": SHIFTED,
    **WINOGRAD,
}
