"""GPU tensors: handed to the backend that serves them beside this one, passed to an MPI library that takes them, or
copied through pinned host memory.

    "cpu:unisono,cuda:nccl" was asked for   ── yes ──▶ NCCL's group
      └ no ▶ does the library move GPU memory, rightly and faster than copies (`collectives/direct.py`)?
               ├ yes ▶ all_reduce, reduce_scatter, broadcast and all_gather take the device's memory as it is
               └ no ─▶ device ──copy──▶ pinned ── the operation ──▶ pinned ──copy──▶ device, on the waiting stream

PyTorch creates only one group for a backend that is written in Python. So this group creates NCCL's at the first
operation on a CUDA tensor, which is the same on all ranks.

Tensors that are not plain, and reductions that the device does not compute there, go through pinned memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from unisono.collectives.direct import COMBINE
from unisono.collectives.payload import is_plain
from unisono.collectives.staged import Staging, refuse_shared, tensors_in
from unisono.errors import BackendError
from unisono.torch_backend.arguments import reduction_of
from unisono.torch_backend.pytorch import GroupBase, ReduceOp, WorkBase
from unisono.torch_backend.register import NAME
from unisono.torch_backend.work import NO_TIMEOUT

DIRECT = ("allreduce", "broadcast", "all_gather_single", "reduce_scatter_single")
"""Operations that the MPI library may carry out in GPU memory."""

Method = TypeVar("Method", bound=Callable[..., Any])


def on_any_device(method: Method) -> Method:
    """Return an operation that takes GPU tensors as well, given one of a process group that takes CPU tensors."""

    @wraps(method)
    def call(group: Any, *arguments: Any, **named: Any) -> Any:
        group.exchanged = True
        first = _first_tensor(arguments)
        if first is None or not first.is_cuda:
            return method(group, *arguments, **named)
        device_backend = group.device_backend(first.device)
        if device_backend is not None:
            return getattr(device_backend, method.__name__)(*arguments, **named)
        if method.__name__ in DIRECT and group.passes_directly(method.__name__, arguments, first.device):
            torch.cuda.current_stream(first.device).synchronize()
            return method(group, *arguments, **named)
        written = [] if method.__name__ == "send" else tensors_in(arguments[0])
        refuse_shared(method.__name__, written)
        staging = Staging(written)
        return DeviceWork(method(group, *map(staging.host, arguments), **named), staging)

    return call  # type: ignore[return-value]  # the same signature


def _first_tensor(values: Any) -> torch.Tensor | None:
    for value in values:
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, list) and (found := _first_tensor(value)) is not None:
            return found
    return None


class DeviceWork(WorkBase):  # type: ignore[misc]  # untyped
    """Operation on copies in host memory; `wait` copies the results back to the GPU."""

    def __init__(self, work: Any, staging: Staging) -> None:
        super().__init__()
        self._work, self._staging = work, staging
        self._copied = False

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait for the operation, copy its results back once, and return True."""
        self._work.wait(timeout)
        if not self._copied:
            self._copied = True
            self._staging.copy_back()
        return True

    def synchronize(self) -> None:
        """Do the same as `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Return True once the operation is over; its tensors are filled after `wait`."""
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        """Return True if the operation has succeeded."""
        return bool(self._work.is_success())

    def exception(self) -> BackendError | None:
        """Return the error of the operation, or None."""
        error: BackendError | None = self._work.exception()
        return error

    def result(self) -> Any:
        """Wait, and return the tensors that the operation filled."""
        self.wait()
        return self._staging.device(self._work.result())

    def source_rank(self) -> int:
        """Return the rank that a message came from."""
        return int(self._work.source_rank())

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the tensors that the operation fills; its errors are those of the operation."""
        filled: torch.futures.Future[Any] = self._work.get_future().then(lambda _: self.result())
        return filled


def create_device_backend(group: Any, device: torch.device, store: Any, timeout: timedelta) -> Any:
    """Return the group that serves this kind of device beside ours, or None where PyTorch was not asked for one.

    Raises BackendError for a backend other than NCCL.
    """
    devices = dict(part.split(":") for part in dist.get_backend_config(group).split(",") if ":" in part)
    name = devices.get(device.type)
    if name in (None, NAME) or group.stands_in:
        return None
    if name != "nccl":
        raise BackendError(f"tensors on {device.type} by {name!r} beside unisono; only nccl is known there")
    device_backend = GroupBase(store, group.rank(), group.size())
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    nccl = dist.ProcessGroupNCCL(store, group.rank(), group.size(), options)
    device_backend._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)
    device_backend._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
    return device_backend


def can_pass_directly(name: str, arguments: Sequence[Any]) -> bool:
    """Return True if the tensors of an operation can be passed directly, and reduced by the library if need be."""
    tensors = [tensor for part in arguments for tensor in tensors_in(part)]
    if not all(not one.is_sparse and is_plain(one) for one in tensors):
        return False
    if name not in ("allreduce", "reduce_scatter_single"):
        return True
    op = next((part.reduceOp for part in arguments if hasattr(part, "reduceOp")), ReduceOp.SUM)
    return reduction_of(op).op in COMBINE and not any(one.dtype is torch.bool or one.is_complex() for one in tensors)
