"""Data sets, loading of batches, and the order of samples.

`Loader` and `partitioned_load` are for a training loop of your own.
"""

from typing import TYPE_CHECKING

from unisono.registry import lazy_attributes

if TYPE_CHECKING:
    from unisono.data.dimd import partitioned_load
    from unisono.data.loader import Loader

__all__ = ["Loader", "partitioned_load"]

__getattr__ = lazy_attributes(__name__, {"Loader": "unisono.data.loader", "partitioned_load": "unisono.data.dimd"})
