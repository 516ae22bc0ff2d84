"""Weight gradient before the input gradient (PCL-DNN section 3.1): an exchange begins one product earlier."""

from unisono.reducer.weight_first.layers import restore, take
from unisono.reducer.weight_first.readings import Readings

__all__ = ["Readings", "restore", "take"]
