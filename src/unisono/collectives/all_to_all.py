"""All-to-all: every rank gives each other rank a chunk of its own."""

from __future__ import annotations

import torch

from unisono.collectives.group import Group
from unisono.collectives.payload import carrier_of, flat_of, memory_of, name_of, nbytes_of
from unisono.errors import TensorError
from unisono.mpi import MPI
from unisono.transports.windows import call


def all_to_all(
    group: Group, tensor: torch.Tensor, algorithm: str = "auto", out: torch.Tensor | None = None
) -> torch.Tensor:
    """Send chunk d of `tensor` to rank d; return what came, chunk s from rank s, in `out` or a new tensor like it.

    A chunk is one of p equal parts of the flattened tensor. Any dtype, any stride. Raises TensorError where p does not
    divide the number of elements.
    """
    if out is None:
        out = torch.empty(tensor.shape, dtype=tensor.dtype)
    nbytes = nbytes_of(tensor)
    if out.numel() != tensor.numel() or out.dtype != tensor.dtype:
        raise TensorError(
            f"rank {group.rank}: {tensor.numel()} x {tensor.dtype} do not fit out, {out.numel()} x {out.dtype}"
        )
    if tensor.numel() % group.size:
        raise TensorError(f"rank {group.rank}: {tensor.numel()} elements are no {group.size} equal parts")
    flat = flat_of(tensor)
    carrier = carrier_of(flat)
    if group.size == 1:
        return out.copy_(flat.view(out.shape))
    plan = group.plan("all_to_all", algorithm, carrier, nbytes, op=None)
    what = call(f"all_to_all({tensor.numel()} x {name_of(tensor.dtype)}, {plan.choice.algorithm})")
    length, part = flat.numel(), flat.numel() // group.size
    if plan.choice.algorithm == "library":
        came = out.detach().view(-1) if out.is_contiguous() else torch.empty_like(flat)
        with group.library_call(what):
            kind = MPI.BYTE
            group.comm.Alltoall(
                [memory_of(flat), nbytes // group.size, kind], [memory_of(came), nbytes // group.size, kind]
            )
        return out if out.is_contiguous() else out.copy_(came.view(out.shape))
    schedule = group.find(plan.choice.algorithm).all_to_all
    assert schedule is not None, "the choice offers what the schedule has"
    both = torch.empty(2 * length, dtype=carrier)  # first what goes, then what comes
    both[:length] = flat.view(carrier)
    own = slice(group.rank * part, (group.rank + 1) * part)
    both[length:][own] = both[own]
    with group.call(what) as number:
        group.play(schedule, both, number, plan, chunk_major=True)
    return out.copy_(both[length:].view(tensor.dtype).view(out.shape))
