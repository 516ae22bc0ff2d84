"""What turns gradients into steps: LARS and LAMB, and which parameters weight decay is for."""

from unisono.optimizers.groups import by_decay
from unisono.optimizers.lamb import LAMB
from unisono.optimizers.lars import LARS

__all__ = ["LAMB", "LARS", "by_decay"]
