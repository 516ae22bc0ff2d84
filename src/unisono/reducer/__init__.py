"""Autograd's hooks become the events of a step program; gradients lie in buckets, which travel meanwhile."""

from unisono.reducer.attachment import reducer_of
from unisono.reducer.control import asked_by
from unisono.reducer.reducer import Reducer

__all__ = ["Reducer", "asked_by", "reducer_of"]
