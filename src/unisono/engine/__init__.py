"""Engine that carries operations out as soon as their dependencies allow."""

from unisono.engine.dependencies import Variable
from unisono.engine.engine import Engine, Handle
from unisono.engine.spans import Observe, OperationSpan, observed

__all__ = ["Engine", "Handle", "Observe", "OperationSpan", "Variable", "observed"]
