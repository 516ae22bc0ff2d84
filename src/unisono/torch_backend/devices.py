"""GPU tensors of a group that was asked for as "cpu:unisono,cuda:nccl": handed to NCCL's group beside ours.

PyTorch creates only one group for a backend that is written in Python. So this group creates NCCL's at the first
operation on a CUDA tensor, which is the same on all ranks. Without NCCL, the collectives take tensors of any device
(`collectives/staged.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from unisono.collectives.staged import tensors_in
from unisono.errors import BackendError
from unisono.torch_backend.pytorch import GroupBase
from unisono.torch_backend.register import NAME

Method = TypeVar("Method", bound=Callable[..., Any])


def on_any_device(method: Method) -> Method:
    """Return an operation of a process group that leaves tensors to the group beside it which serves their device."""

    @wraps(method)
    def call(group: Any, *arguments: Any, **named: Any) -> Any:
        group.exchanged = True
        tensors = tensors_in([*arguments])
        beside = group.device_backend(tensors[0].device) if tensors and not tensors[0].is_cpu else None
        act = method.__get__(group) if beside is None else getattr(beside, method.__name__)
        return act(*arguments, **named)

    return call  # type: ignore[return-value]  # the same signature


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
