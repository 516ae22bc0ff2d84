"""Engine that carries operations out as soon as their dependencies allow."""

from unisono.engine.dependencies import Variable
from unisono.engine.engine import Engine, Handle, OperationSpan

__all__ = ["Engine", "Handle", "OperationSpan", "Variable"]
