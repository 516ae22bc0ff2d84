"""Tensors as MPI sees them: their memory, and the type that stands for their elements."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from unisono.errors import TensorError
from unisono.mpi import MPI
from unisono.transports.arithmetic import Array

MPI_TYPES = {
    torch.float64: MPI.DOUBLE,
    torch.float32: MPI.FLOAT,
    torch.int64: MPI.INT64_T,
    torch.int32: MPI.INT32_T,
    torch.int16: MPI.INT16_T,
    torch.int8: MPI.INT8_T,
    torch.uint64: MPI.UINT64_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint8: MPI.UINT8_T,
    torch.bool: MPI.UINT8_T,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
}

CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""What stands in for dtypes of that many bytes where nothing is reduced."""


def nbytes_of(tensor: torch.Tensor) -> int:
    """The bytes of a tensor's elements. Raises TensorError for one that is not in plain CPU memory."""
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        raise TensorError(f"cannot carry a {tensor.layout} tensor on {tensor.device}; move it to the CPU, dense, first")
    return int(tensor.nbytes)


def memory_of(tensor: torch.Tensor) -> MPI.memory:
    """The memory of a contiguous tensor."""
    return MPI.memory.fromaddress(tensor.data_ptr(), tensor.nbytes)


class _Memory:
    """A tensor's memory in the form that NumPy asks for; an array of it keeps the tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        shape, data = (tensor.nbytes,), (tensor.data_ptr(), False)
        self.__array_interface__ = {"shape": shape, "typestr": "|u1", "data": data, "version": 3}


def bytes_of(tensor: torch.Tensor) -> Array:
    """The memory of a contiguous tensor as a flat array of bytes, which keeps the tensor."""
    return np.asarray(_Memory(tensor))


def flat_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements one after another: the tensor's own memory if they lie so there, else a copy."""
    return content_of(tensor).detach().view(-1)


def plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory holds its elements one after another, as they are."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def content_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor to send: itself if it is plain, else a copy that is."""
    return tensor if plain(tensor) else tensor.detach().resolve_conj().resolve_neg().contiguous()


def room_for(tensor: torch.Tensor) -> torch.Tensor:
    """Where what comes for a tensor lands: itself if it is plain, else one that is; `settle` then brings it home."""
    return tensor if plain(tensor) else torch.empty(tensor.shape, dtype=tensor.dtype)


def settle(tensors: Iterable[torch.Tensor], rooms: Iterable[torch.Tensor]) -> None:
    """Copy what has landed elsewhere to where it belongs."""
    for tensor, room in zip(tensors, rooms, strict=True):
        if room is not tensor:
            tensor.detach().copy_(room)


def carrier_of(tensor: torch.Tensor) -> torch.dtype:
    """A dtype of the same size that every transport knows, for tensors that are only moved."""
    if tensor.dtype.itemsize not in CARRIERS:
        raise TensorError(f"cannot carry a tensor of {tensor.dtype}: its elements have {tensor.dtype.itemsize} bytes")
    return CARRIERS[tensor.dtype.itemsize]


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype as people say it."""
    return str(dtype).removeprefix("torch.")
