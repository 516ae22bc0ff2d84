"""Allreduce: every rank ends with the sum of what all ranks had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from unisono.collectives.group import Group, Plan
from unisono.collectives.payload import MPI_TYPES, memory_of, nbytes_of
from unisono.mpi import MPI
from unisono.schedules.pieces import cut
from unisono.transports.arithmetic import HALF_DTYPES, Step
from unisono.transports.player import play
from unisono.transports.staging import SLOT
from unisono.transports.sweep import plan_sweep, sweep
from unisono.transports.windows import Call, WindowChannel, call

KEPT = 256
"""Plans that are kept for short tensors, and for tensors in windows."""


class _Ready(NamedTuple):
    """All that an allreduce of one dtype and size needs but the payload: for short ones, where planning would count."""

    dtype: torch.dtype
    play: Callable[[int], None]


class Allreduce:
    """The allreduce of one group, with what it has planned so far."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._sweeps: dict[tuple[int, int, torch.dtype], tuple[list[Step], Call]] = {}
        self._ready: dict[tuple[int, str], _Ready] = {}

    def __call__(self, tensor: torch.Tensor, algorithm: str = "auto") -> torch.Tensor:
        """Sum `tensor` over all ranks, in place, and return it: any shape, any stride, the same on every rank.

        `algorithm` is "auto" (the table chooses), "library", or the name of a schedule. Every rank ends with the same
        bits. Raises TensorError for a dtype or device that cannot be carried, UsageError for an unknown algorithm.
        """
        ready = self._ready.get((tensor.numel(), algorithm))
        if ready is not None and ready.dtype is tensor.dtype and tensor.is_contiguous() and tensor.is_cpu:
            ready.play(tensor.data_ptr())
            return tensor
        nbytes = nbytes_of(tensor)
        plan = self._group.plan("allreduce", algorithm, tensor.dtype, nbytes)
        if self._group.size == 1:
            return tensor
        if not tensor.is_contiguous():
            with torch.no_grad():
                return tensor.copy_(self(tensor.detach().contiguous(), algorithm))
        payload = memory_of(tensor)
        if plan.choice.transport == "windows":
            self._on_node(payload, tensor, algorithm, plan)
        elif plan.choice.algorithm == "library":
            self._group.meet(plan.what)
            self._by_library(payload, tensor)
        else:
            self._group.play(self._group.find(plan.choice.algorithm).allreduce, tensor)
        return tensor

    def forget(self) -> None:
        """Forget what was planned: windows come or go."""
        self._sweeps.clear()
        self._ready.clear()

    def _prepare(self, algorithm: str, tensor: torch.Tensor, play: Callable[[int], None]) -> None:
        """Keep what plays an allreduce of a tensor like this, for the next of its kind."""
        if len(self._ready) == KEPT:
            self._ready.clear()
        self._ready[tensor.numel(), algorithm] = _Ready(tensor.dtype, play)

    def _by_library(self, payload: Any, tensor: torch.Tensor) -> None:
        if tensor.dtype in HALF_DTYPES:
            exact = tensor.float()
            self._group.comm.Allreduce(MPI.IN_PLACE, [memory_of(exact), exact.numel(), MPI.FLOAT])
            tensor.detach().copy_(exact)
        else:
            self._group.comm.Allreduce(MPI.IN_PLACE, [payload, tensor.numel(), MPI_TYPES[tensor.dtype]])

    def _on_node(self, payload: Any, tensor: torch.Tensor, algorithm: str, plan: Plan) -> None:
        memory, arithmetic, what, dtype = self._group.node_memory, plan.arithmetic, plan.what, tensor.dtype
        nbytes = len(payload)
        if nbytes == 0:
            memory.signals.meet(what)
            return
        if plan.choice.algorithm == "flat":
            for start in range(0, nbytes, SLOT):
                part = min(SLOT, nbytes - start)
                memory.staging.flat(part, arithmetic, what)(tensor.data_ptr() + start)
            if nbytes <= SLOT:
                self._prepare(algorithm, tensor, memory.staging.flat(nbytes, arithmetic, what))
            return
        key = tensor.data_ptr(), nbytes, dtype
        if key in self._sweeps:
            steps, what = self._sweeps[key]
            sweep(steps, memory.signals, what)
            return
        found = memory.find(tensor.data_ptr(), nbytes)
        if found is None and plan.sweeps:
            memory.staging.allreduce(arithmetic.view(payload), dtype.itemsize, arithmetic, what)
            return
        if found is None or (dtype in HALF_DTYPES and not plan.sweeps):
            memory.signals.meet(what)
            self._group.play(self._group.find(plan.choice.algorithm).allreduce, tensor)
            return
        where, buffers = found
        what = call(f"{what.words} in {where}")
        views = [arithmetic.view(buffer) for buffer in buffers]
        if plan.sweeps:
            if len(self._sweeps) == KEPT:
                self._sweeps.clear()
            self._sweeps[key] = plan_sweep(views, self._group.rank, dtype.itemsize, arithmetic), what
            sweep(self._sweeps[key][0], memory.signals, what)
        else:
            memory.signals.meet(what)
            program = self._group.find(plan.choice.algorithm).allreduce(self._group.rank, self._group.size)
            channel = WindowChannel(memory.signals, views, len(program.lanes), arithmetic)
            play(program, cut(tensor.numel(), program.chunks, tensor.numel()), channel, in_flight=1)
