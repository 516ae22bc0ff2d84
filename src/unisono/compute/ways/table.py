"""Ways by name. The first is PyTorch's own, which can compute any layer."""

from __future__ import annotations

from unisono.compute.ways.library import CHANNELS_FIRST, CHANNELS_LAST
from unisono.compute.ways.product import PRODUCT
from unisono.compute.ways.shifted import SHIFTED
from unisono.compute.ways.unfolded import UNFOLD
from unisono.compute.ways.way import Way
from unisono.compute.ways.winograd import WINOGRAD

OWN = "library, channels last"

WAYS: dict[str, Way] = {
    OWN: CHANNELS_LAST,
    "library, channels first": CHANNELS_FIRST,
    "product": PRODUCT,
    "unfolded": UNFOLD,
    "shifted": SHIFTED,
    **WINOGRAD,
}
