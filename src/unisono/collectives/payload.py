"""Tensors as MPI sees them: their memory, and the type that stands for their elements."""

from __future__ import annotations

import torch

from unisono.errors import TensorError
from unisono.mpi import MPI

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


def flat_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements one after another: the tensor's own memory if they lie so there, else a copy."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def carrier_of(tensor: torch.Tensor) -> torch.dtype:
    """A dtype of the same size that every transport knows, for tensors that are only moved."""
    if tensor.dtype.itemsize not in CARRIERS:
        raise TensorError(f"cannot carry a tensor of {tensor.dtype}: its elements have {tensor.dtype.itemsize} bytes")
    return CARRIERS[tensor.dtype.itemsize]


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype as people say it."""
    return str(dtype).removeprefix("torch.")
