"""A GPU's tensors straight to an MPI library that takes them, once it has shown that it does.

    does the library say so?  ── no ──▶ through pinned memory (`devices.py`)
      └ yes ▶ does a sum of ones on the device come out as the number of ranks?  ── no ──▶ through pinned memory
                └ yes ▶ all_reduce, reduce_scatter, broadcast and all_gather take the device's memory as it is

A library that was not built for GPUs would read a device's address as one of the host and crash, so it is asked first;
one that was may still not work with the driver at hand, so it is tried, too. What MPI has no number format or no
fitting operation for (half types; minimum and maximum, which must agree about NaN) goes through pinned memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch

from unisono.call import call
from unisono.collectives.checks import Checks, check_chunk
from unisono.collectives.group import Group
from unisono.collectives.library import OPS
from unisono.collectives.overlap import shared
from unisono.collectives.payload import MPI_TYPES, memory_of, name_of, plain
from unisono.mpi import MPI, least
from unisono.torch_backend.pytorch import ReduceOp
from unisono.torch_backend.reductions import reduction_of

SUMS = ("sum", "product")
"""The ops that give the same by any order of the library's, up to rounding."""

REDUCIBLE = frozenset(MPI_TYPES) - {torch.bool}
"""What the library can reduce as it is."""


def says_so() -> bool:
    """Whether the MPI library says that it takes a GPU's memory (MPICH's and Open MPI's extension)."""
    query: Callable[[], int] | None = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", None)
    return query is not None and bool(query())


def shows_so(group: Group, device: torch.device) -> bool:
    """Whether a sum over all ranks of `group` comes out right in the memory of `device`. Called by all together."""
    ones = torch.ones(1000, device=device)
    allreduce_directly(group, ones, "sum")
    right = bool((ones == group.size).all())
    return bool(least(group.comm, right))


def can_go(name: str, arguments: Sequence[Any]) -> bool:
    """Whether the tensors of an operation may go straight, and be reduced by the library where it reduces them."""
    tensors = [one for part in arguments for one in (part if isinstance(part, list) else [part])]
    tensors = [one for one in tensors if isinstance(one, torch.Tensor)]
    if not all(not one.is_sparse and plain(one) for one in tensors):
        return False
    if name not in ("allreduce", "reduce_scatter_single"):
        return True
    op = next((part.reduceOp for part in arguments if hasattr(part, "reduceOp")), ReduceOp.SUM)
    return reduction_of(op).op in SUMS and all(one.dtype in REDUCIBLE for one in tensors)


def allreduce_directly(group: Group, tensor: torch.Tensor, op: str) -> None:
    """Reduce `tensor` over all ranks, in place."""
    _settle(tensor)
    with group.library_call(call(f"all_reduce({tensor.numel()} x {name_of(tensor.dtype)}, {op}) of a device")):
        request = group.comm.Iallreduce(MPI.IN_PLACE, [memory_of(tensor), MPI_TYPES[tensor.dtype]], OPS[op])
        group.finish(request, tensor)


def part_reduce_directly(group: Group, tensor: torch.Tensor, part: torch.Tensor, op: str) -> None:
    """Reduce `tensor` over all ranks; `part` of rank r becomes the r-th of its equal parts."""
    with Checks(group, "reduce_scatter"):
        check_chunk(group, "reduce_scatter", part, tensor, group.rank * part.numel())
    in_place = shared(part, tensor)  # MPI takes no memory that is both
    into = torch.empty_like(part) if in_place else part
    _settle(tensor)
    with group.library_call(call(f"reduce_scatter({tensor.numel()} x {name_of(tensor.dtype)}, {op}) of a device")):
        kind = MPI_TYPES[tensor.dtype]
        request = group.comm.Ireduce_scatter_block([memory_of(tensor), kind], [memory_of(into), kind], OPS[op])
        group.finish(request, tensor, into)
    if in_place:
        part.copy_(into)


def broadcast_directly(group: Group, tensor: torch.Tensor, root: int) -> None:
    """All ranks end with what the root had, in place."""
    _settle(tensor)
    with group.library_call(call(f"broadcast({tensor.numel()} x {name_of(tensor.dtype)}, from {root}) of a device")):
        group.finish(group.comm.Ibcast([memory_of(tensor), MPI.BYTE], root), tensor)


def part_broadcast_directly(group: Group, part: torch.Tensor, out: torch.Tensor) -> None:
    """`out` becomes what all ranks have as `part`, side by side."""
    with Checks(group, "all_gather"):
        check_chunk(group, "all_gather", part, out, group.rank * part.numel())
    own: Any = MPI.IN_PLACE if shared(part, out) else [memory_of(part), MPI.BYTE]
    _settle(part)
    with group.library_call(call(f"all_gather({out.numel()} x {name_of(out.dtype)}) of a device")):
        request = group.comm.Iallgather(own, [memory_of(out), MPI.BYTE])
        group.finish(request, part, out)


def _settle(tensor: torch.Tensor) -> None:
    """Wait for what this thread's stream computes of the tensor: the library knows no streams."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
