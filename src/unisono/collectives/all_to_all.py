"""All-to-all: every rank gives each other rank a chunk of its own."""

from __future__ import annotations

import torch

from unisono.collectives.group import Group
from unisono.collectives.payload import carrier_of, memory_of, name_of, nbytes_of
from unisono.errors import TensorError
from unisono.mpi import MPI
from unisono.transports.windows import call


def all_to_all(group: Group, tensor: torch.Tensor, algorithm: str = "auto") -> torch.Tensor:
    """Send chunk d of `tensor` to rank d; return what came, chunk s from rank s, in a new tensor of the same shape.

    A chunk is one of p equal parts of the flattened tensor. Any dtype of 1, 2, 4 or 8 bytes, any stride. Raises
    TensorError where p does not divide the number of elements.
    """
    nbytes = nbytes_of(tensor)
    if tensor.numel() % group.size:
        raise TensorError(f"rank {group.rank}: {tensor.numel()} elements are no {group.size} equal parts")
    flat = tensor.detach().contiguous().view(-1)
    carrier = carrier_of(flat)
    if group.size == 1:
        return flat.clone().view(tensor.shape)
    choice = group.choose("all_to_all", algorithm, nbytes)
    what = call(f"all_to_all({tensor.numel()} x {name_of(tensor.dtype)}, {choice.algorithm})")
    length, part = flat.numel(), flat.numel() // group.size
    if choice.algorithm == "library":
        out = torch.empty_like(flat)
        with group.library_call(what):
            kind = MPI.BYTE
            group.comm.Alltoall(
                [memory_of(flat), nbytes // group.size, kind], [memory_of(out), nbytes // group.size, kind]
            )
        return out.view(tensor.shape)
    schedule = group.find(choice.algorithm).all_to_all
    assert schedule is not None, "the choice offers what the schedule has"
    both = torch.empty(2 * length, dtype=carrier)  # first what goes, then what comes
    both[:length] = flat.view(carrier)
    own = slice(group.rank * part, (group.rank + 1) * part)
    both[length:][own] = both[own]
    with group.call(what) as number:
        group.play(schedule, both, number, chunk_major=True)
    return both[length:].view(tensor.dtype).view(tensor.shape).clone()
