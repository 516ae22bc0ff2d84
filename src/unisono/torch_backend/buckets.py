"""Gradient buckets of DistributedDataParallel in memory that the ranks of a node share: all_reduce is in place there.

    DistributedDataParallel ──▶ dist.Reducer, here a subclass ── __init__, _rebuild_buckets ──▶ PyTorch's own
                                                                     │  empty(length, dtype) of each bucket
                                    ProcessGroup.empty ◀── _SharedBuckets (dispatch mode of the calling thread)

PyTorch 2.13 has no way for a backend in Python to give a Reducer memory, and 2.14's is off by default for the whole
process. So the allocation itself is intercepted, and only it: a bucket lies in shared memory from the first moment on,
and no memory is moved that somebody might point to. All ranks make the same buckets in the same order, since
DistributedDataParallel's constructor has collectives of its own just before, and `_rebuild_buckets` begins with one. A
copy of a model, which any rank may make alone, has ordinary memory for good.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from unisono.torch_backend.operations import CollectiveOperations
from unisono.torch_backend.pytorch import DispatchModeBase, ReducerBase

OFF_VARIABLE = "DDP_DISABLE_COMM_MEM"
"""PyTorch's variable: set to 1 on all ranks, it leaves the buckets of new models in ordinary memory."""


class SharedBucketReducer(ReducerBase):  # type: ignore[misc]  # untyped
    """PyTorch's Reducer, whose buckets are allocated by its process group if that is ours."""

    def __init__(
        self,
        params: Any,
        bucket_indices: Any,
        per_bucket_size_limits: Any,
        process_group: Any,
        *arguments: Any,
        **named: Any,
    ) -> None:
        maker = sys._getframe(1).f_back  # DistributedDataParallel's __init__, or __setstate__ without init_sync
        self._collective = maker is not None and maker.f_locals.get("init_sync", False)
        self._memory = self._memory_of(process_group)
        with self._memory:
            super().__init__(params, bucket_indices, per_bucket_size_limits, process_group, *arguments, **named)

    def _rebuild_buckets(self) -> bool:
        """Do as PyTorch does: once, after the first backward pass, buckets take the order of its gradients."""
        with self._memory:
            return bool(super()._rebuild_buckets())

    def _update_process_group(self, new_process_group: Any) -> None:
        """Do as PyTorch does: reduce over other ranks from now on."""
        self._memory = self._memory_of(new_process_group)
        super()._update_process_group(new_process_group)

    def _set_forward_pass_work_handle(self, work: Any, use_static_world_size: bool) -> None:
        """Do as PyTorch does, and keep the work: C++ finds its methods only while the object in Python lives."""
        self._joined = work
        super()._set_forward_pass_work_handle(work, use_static_world_size)

    def _memory_of(self, group: Any) -> _SharedBuckets:
        return _SharedBuckets(group if self._collective else None)


class _SharedBuckets(DispatchModeBase):  # type: ignore[misc]  # untyped
    """Context in which a flat floating-point tensor of the CPU is allocated by `group`, if that is a group of ours."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        shares = isinstance(group, CollectiveOperations) and os.environ.get(OFF_VARIABLE) != "1"
        self._group = group if shares else None

    def __torch_dispatch__(
        self,
        operation: Callable[..., Any],
        types: Sequence[type],
        arguments: Sequence[Any] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:
        named = named or {}
        if self._group is not None and operation is torch.ops.aten.empty.memory_format:
            (length, *more), dtype, device = arguments[0], named.get("dtype"), named.get("device")
            floating = dtype is not None and (dtype.is_floating_point or dtype.is_complex)
            if not more and floating and device is not None and device.type == "cpu":
                return self._group.empty(length, dtype)
        return operation(*arguments, **named)
