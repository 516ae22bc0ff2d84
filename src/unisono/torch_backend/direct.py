"""GPU tensors passed directly to an MPI library that supports them, once a test has shown that it does.

    does the library report it?  ── no ──▶ through pinned memory (`devices.py`)
      └ yes ▶ is a sum of ones on the device equal to the number of ranks?  ── no ──▶ through pinned memory
                └ yes ▶ all_reduce, reduce_scatter, broadcast and all_gather take the device's memory as it is

A library that was not built for GPUs would read a device address as a host address and crash, so it is queried first.
One that was built for GPUs may still fail with the installed driver, so it is tested too. Data for which MPI has no
number format or no fitting operation (half types; minimum and maximum, which must agree about NaN) goes through pinned
memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch

from unisono.call import call_of
from unisono.collectives.checks import Checks, check_chunk
from unisono.collectives.group import Group
from unisono.collectives.library import OPS
from unisono.collectives.payload import MPI_TYPES, is_plain, memory_of, name_of, share_memory
from unisono.mpi import MPI, allreduce_min
from unisono.torch_backend.pytorch import ReduceOp
from unisono.torch_backend.reductions import reduction_of

SUMS = ("sum", "product")
"""Ops whose result depends on the library's order of reduction by rounding only."""

REDUCIBLE = frozenset(MPI_TYPES) - {torch.bool}
"""Dtypes that the MPI library can reduce."""


def mpi_reports_gpu_support() -> bool:
    """Return True if the MPI library reports support for GPU memory (an extension of MPICH and Open MPI)."""
    query: Callable[[], int] | None = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", None)
    return query is not None and bool(query())


def gpu_sum_works(group: Group, device: torch.device) -> bool:
    """Return True if a sum over all ranks of `group` is right in the memory of `device`. Called by all together."""
    ones = torch.ones(1000, device=device)
    allreduce_directly(group, ones, "sum")
    right = bool((ones == group.size).all())
    return bool(allreduce_min(group.comm, right))


def can_pass_directly(name: str, arguments: Sequence[Any]) -> bool:
    """Return True if the tensors of an operation can be passed directly, and reduced by the library if need be."""
    tensors = [one for part in arguments for one in (part if isinstance(part, list) else [part])]
    tensors = [one for one in tensors if isinstance(one, torch.Tensor)]
    if not all(not one.is_sparse and is_plain(one) for one in tensors):
        return False
    if name not in ("allreduce", "reduce_scatter_single"):
        return True
    op = next((part.reduceOp for part in arguments if hasattr(part, "reduceOp")), ReduceOp.SUM)
    return reduction_of(op).op in SUMS and all(one.dtype in REDUCIBLE for one in tensors)


def allreduce_directly(group: Group, tensor: torch.Tensor, op: str) -> None:
    """Reduce `tensor` over all ranks by `op`, in place."""
    _synchronize(tensor)
    with group.enter_library_call(call_of(f"all_reduce({tensor.numel()} x {name_of(tensor.dtype)}, {op}) of a device")):
        request = group.comm.Iallreduce(MPI.IN_PLACE, [memory_of(tensor), MPI_TYPES[tensor.dtype]], OPS[op])
        group.wait_for(request, tensor)


def reduce_scatter_directly(group: Group, tensor: torch.Tensor, part: torch.Tensor, op: str) -> None:
    """Reduce `tensor` over all ranks by `op`; `part` of rank r receives the r-th of its equal parts.

    Raises TensorError where `part` shares memory with `tensor` in any other place than that part.
    """
    with Checks(group, "reduce_scatter"):
        check_chunk(group, "reduce_scatter", part, tensor, group.rank * part.numel())
    in_place = share_memory(part, tensor)  # MPI takes no memory that is both
    into = torch.empty_like(part) if in_place else part
    _synchronize(tensor)
    call = call_of(f"reduce_scatter({tensor.numel()} x {name_of(tensor.dtype)}, {op}) of a device")
    with group.enter_library_call(call):
        kind = MPI_TYPES[tensor.dtype]
        request = group.comm.Ireduce_scatter_block([memory_of(tensor), kind], [memory_of(into), kind], OPS[op])
        group.wait_for(request, tensor, into)
    if in_place:
        part.copy_(into)


def broadcast_directly(group: Group, tensor: torch.Tensor, root: int) -> None:
    """Copy the root's `tensor` to all ranks, in place."""
    _synchronize(tensor)
    call = call_of(f"broadcast({tensor.numel()} x {name_of(tensor.dtype)}, from {root}) of a device")
    with group.enter_library_call(call):
        group.wait_for(group.comm.Ibcast([memory_of(tensor), MPI.BYTE], root), tensor)


def all_gather_directly(group: Group, part: torch.Tensor, out: torch.Tensor) -> None:
    """Gather every rank's `part` into `out`, side by side.

    Raises TensorError where `part` shares memory with `out` in any other place than its own.
    """
    with Checks(group, "all_gather"):
        check_chunk(group, "all_gather", part, out, group.rank * part.numel())
    own: Any = MPI.IN_PLACE if share_memory(part, out) else [memory_of(part), MPI.BYTE]
    _synchronize(part)
    with group.enter_library_call(call_of(f"all_gather({out.numel()} x {name_of(out.dtype)}) of a device")):
        request = group.comm.Iallgather(own, [memory_of(out), MPI.BYTE])
        group.wait_for(request, part, out)


def _synchronize(tensor: torch.Tensor) -> None:
    """Wait until this thread's stream has computed the tensor: the MPI library knows no streams."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
