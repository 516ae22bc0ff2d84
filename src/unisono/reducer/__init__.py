"""Reducer: autograd's hooks become the events of a step program, and buckets of gradients are exchanged meanwhile."""

from unisono.reducer.control import requested_by
from unisono.reducer.hooks import reducer_of
from unisono.reducer.reducer import Reducer

__all__ = ["Reducer", "reducer_of", "requested_by"]
