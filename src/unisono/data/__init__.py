"""Data sets, loading of batches, and the order of samples. `Loader` is for a training loop of your own."""

from typing import TYPE_CHECKING

from unisono.registry import lazy_attributes

if TYPE_CHECKING:
    from unisono.data.loader import Loader

__all__ = ["Loader"]

__getattr__ = lazy_attributes(__name__, {"Loader": "unisono.data.loader"})
