"""Engine that carries operations out as soon as their dependencies allow."""

from unisono.engine.dependencies import Variable
from unisono.engine.engine import Closing, Engine, Handle, Observe, OperationSpan, observed, weakly

__all__ = ["Closing", "Engine", "Handle", "Observe", "OperationSpan", "Variable", "observed", "weakly"]
