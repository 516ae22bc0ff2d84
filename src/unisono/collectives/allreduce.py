"""Allreduce: every rank ends with the sum, or another reduction, of what all ranks had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from unisono.collectives.checks import Checks, check_output
from unisono.collectives.group import Group
from unisono.collectives.hierarchical import allreduce_in_levels
from unisono.collectives.library import allreduce_by_library, carries_check, plan_short
from unisono.collectives.payload import content_of, memory_of, nbytes_of, plain
from unisono.collectives.plans import Plan
from unisono.schedules.pieces import cut
from unisono.transports.arithmetic import HALF_DTYPES, Step
from unisono.transports.player import play
from unisono.transports.shared_memory import SharedMemory
from unisono.transports.sweep import plan_sweep, sweep
from unisono.transports.window_channel import WindowChannel
from unisono.transports.windows import Call, call

KEPT = 256
"""Plans that are kept for short tensors, and for tensors in windows."""


How = tuple[str, str | None, str]
"""The algorithm, the wire and the op that were asked for."""

Swept = tuple[int, int, torch.dtype, How]
"""The address, the bytes and the dtype of a tensor in a window, and how it was summed."""


class _Ready(NamedTuple):
    """All that an allreduce of one dtype and size needs but the payload: for short ones, where planning would count."""

    dtype: torch.dtype
    play: Callable[[int], None]


class Allreduce:
    """The allreduce of one group, with what it has planned so far."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._sweeps: dict[Swept, tuple[list[Step], Call]] = {}
        self._ready: dict[tuple[int, str, str | None, str], _Ready] = {}
        self._columns: Allreduce | None = None

    def __call__(
        self, tensor: torch.Tensor, algorithm: str = "auto", wire: str | None = None, op: str = "sum"
    ) -> torch.Tensor:
        """Reduce `tensor` over all ranks, in place, and return it: any shape, any stride, the same on every rank.

        `algorithm` is "auto" (what was measured, or else priced, chooses), "library", or the name of a schedule. `wire`
        is the number format in a schedule's messages: "float32", "float16" or "bfloat16"; None for the tensor's own.
        Shared memory and the library carry tensors as they are. `op` is "sum", "product", "minimum", "maximum", or for
        integers and bool "and", "or", "xor". Sums are made in float32 or wider. Every rank ends with the same bits.
        Raises TensorError for a dtype, a device or a wire that cannot be carried, UsageError for an unknown algorithm
        or op, MismatchError when ranks are in different calls.
        """
        ready = self._ready.get((tensor.numel(), algorithm, wire, op))
        if ready is not None:
            dtype, play = ready
            if tensor.dtype is dtype and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg():
                play(tensor.data_ptr())
                return tensor
        with Checks(self._group, "allreduce"):
            plan = self._group.plan("allreduce", algorithm, tensor.dtype, nbytes_of(tensor), wire, op)
            check_output(self._group, tensor, "allreduce")
        if self._group.size == 1:
            return tensor
        if not plain(tensor):
            with torch.no_grad():
                return tensor.copy_(self(content_of(tensor), algorithm, wire, op))
        name, _, inner = plan.choice.algorithm.partition("/")
        if plan.choice.transport == "windows":
            self._on_node(memory_of(tensor), tensor, (algorithm, wire, op), plan)
        elif name == "hierarchical":
            self._in_levels(tensor, (inner or "ring", wire, op), plan)
        elif name == "library" and op == "sum" and carries_check(self._group, tensor, plan.what):
            play_short = plan_short(self._group, tensor.numel(), tensor.dtype, plan.what)
            self._prepare((algorithm, wire, op), tensor, play_short)
            play_short(tensor.data_ptr())
        elif name == "library":
            allreduce_by_library(self._group, tensor, op, plan)
        else:
            self._by_messages(tensor, plan)
        return tensor

    def forget(self) -> None:
        """Forget what was planned: windows come or go."""
        self._sweeps.clear()
        self._ready.clear()
        self._columns = None

    def _prepare(self, how: How, tensor: torch.Tensor, play: Callable[[int], None]) -> None:
        """Keep what plays an allreduce of a tensor like this, for the next of its kind."""
        if len(self._ready) == KEPT:
            self._ready.clear()
        self._ready[tensor.numel(), *how] = _Ready(tensor.dtype, play)

    def _by_messages(self, tensor: torch.Tensor, plan: Plan) -> None:
        with self._group.call(plan.what) as number:
            self._group.play(self._group.find(plan.choice.algorithm).allreduce, tensor.detach(), number, plan)

    def _in_levels(self, tensor: torch.Tensor, how: How, plan: Plan) -> None:
        def between(column: Group, part: torch.Tensor) -> None:
            if self._columns is None:
                self._columns = Allreduce(column)
            self._columns(part, *how)

        allreduce_in_levels(self._group, tensor, plan, between)

    def _on_node(self, payload: Any, tensor: torch.Tensor, how: How, plan: Plan) -> None:
        memory, arithmetic, what, dtype = self._group.memory_for(plan.what), plan.arithmetic, plan.what, tensor.dtype
        nbytes = len(payload)
        if nbytes == 0:
            memory.signals.meet(what)
            return
        if plan.choice.algorithm == "flat":
            for start in range(0, nbytes, memory.slot):
                part = min(memory.slot, nbytes - start)
                memory.staging.flat(part, arithmetic, what)(tensor.data_ptr() + start)
            if nbytes <= memory.slot:
                self._prepare(how, tensor, memory.staging.flat(nbytes, arithmetic, what))
            return
        key = tensor.data_ptr(), nbytes, dtype, how
        if (swept := self._sweeps.get(key)) is not None:
            steps, what = swept
            sweep(steps, memory.signals, what)
            return
        found = self._group.find_shared(tensor.data_ptr(), nbytes)
        if found is None and plan.sweeps:
            memory.staging.reduce(arithmetic.view(payload), dtype.itemsize, arithmetic, what)
        elif found is None or (dtype in HALF_DTYPES and not plan.sweeps):
            self._by_messages(tensor, plan)
        else:
            self._in_window(*found, tensor, key, plan)

    def _in_window(self, where: str, shared: SharedMemory, tensor: torch.Tensor, key: Swept, plan: Plan) -> None:
        """Reduce a tensor that lies in shared memory; `where` says in which and at which place: ranks compare that."""
        memory, arithmetic, what = self._group.node_memory, plan.arithmetic, call(f"{plan.what.words} in {where}")
        address, nbytes = key[:2]
        first = address - shared.start
        views = [arithmetic.view(buffer[first : first + nbytes]) for buffer in shared.buffers]
        if plan.sweeps:
            if len(self._sweeps) == KEPT:
                self._sweeps.clear()
            steps = plan_sweep(views, self._group.rank, tensor.dtype.itemsize, arithmetic)
            shared.plan(self._sweeps)
            self._sweeps[key] = steps, what
            sweep(steps, memory.signals, what)
        else:
            memory.signals.meet(what)
            program = self._group.find(plan.choice.algorithm).allreduce(self._group.rank, self._group.size)
            channel = WindowChannel(memory.signals, views, len(program.lanes), arithmetic, what)
            play(program, cut(tensor.numel(), program.chunks, tensor.numel()), channel, in_flight=1)
