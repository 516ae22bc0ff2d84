"""Operations that are carried out as soon as what they need is there."""

from unisono.engine.dependencies import Variable
from unisono.engine.engine import Engine, Handle, Span

__all__ = ["Engine", "Handle", "Span", "Variable"]
