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
    torch.uint8: MPI.UINT8_T,
}

CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""What stands in for dtypes of that many bytes where nothing is summed."""


def nbytes_of(tensor: torch.Tensor) -> int:
    """The bytes of a tensor's elements. Raises TensorError for one that is not in plain CPU memory."""
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        raise TensorError(f"cannot carry a {tensor.layout} tensor on {tensor.device}; move it to the CPU, dense, first")
    return int(tensor.nbytes)


def memory_of(tensor: torch.Tensor) -> MPI.memory:
    """The memory of a contiguous tensor."""
    return MPI.memory.fromaddress(tensor.data_ptr(), tensor.nbytes)


def carrier_of(tensor: torch.Tensor) -> torch.dtype:
    """A dtype of the same size that every transport knows, for tensors that are only moved."""
    if tensor.dtype.itemsize not in CARRIERS:
        raise TensorError(f"cannot carry a tensor of {tensor.dtype}: its elements have {tensor.dtype.itemsize} bytes")
    return CARRIERS[tensor.dtype.itemsize]


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype as people say it."""
    return str(dtype).removeprefix("torch.")
