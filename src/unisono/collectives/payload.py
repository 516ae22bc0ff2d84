"""Tensors for MPI: their memory, and the MPI type of their elements."""

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

MOVE_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Dtype that replaces any dtype of that many bytes when nothing is reduced."""


def nbytes_of(tensor: torch.Tensor) -> int:
    """Return the size of a tensor in bytes. Raises TensorError for one that is not in plain CPU memory."""
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        raise TensorError(f"unsupported tensor: {tensor.layout} on {tensor.device}; convert it to a dense CPU tensor")
    return int(tensor.nbytes)


def memory_of(tensor: torch.Tensor) -> MPI.memory:
    """Return the memory of a contiguous tensor."""
    return MPI.memory.fromaddress(tensor.data_ptr(), tensor.nbytes)


class _ByteArray:
    """Array interface of a tensor's memory for NumPy; an array made from it keeps the tensor alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        shape, data = (tensor.nbytes,), (tensor.data_ptr(), False)
        self.__array_interface__ = {"shape": shape, "typestr": "|u1", "data": data, "version": 3}


def bytes_of(tensor: torch.Tensor) -> Array:
    """Return the memory of a contiguous tensor as a flat array of bytes, which keeps the tensor alive."""
    return np.asarray(_ByteArray(tensor))


def flat_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat tensor of the elements: a view of the tensor's memory if it is plain, else a copy."""
    return send_buffer(tensor).detach().view(-1)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is contiguous, without a pending conjugation or negation."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def send_buffer(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor to send: itself if it is plain, else a plain copy."""
    return tensor if is_plain(tensor) else tensor.detach().resolve_conj().resolve_neg().contiguous()


def receive_buffer(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor to receive into: itself if it is plain, else a plain one; `copy_back` then copies it back."""
    return tensor if is_plain(tensor) else torch.empty(tensor.shape, dtype=tensor.dtype)


def copy_back(tensors: Iterable[torch.Tensor], buffers: Iterable[torch.Tensor]) -> None:
    """Copy each buffer from `receive_buffer` into its tensor, where they differ."""
    for tensor, buffer in zip(tensors, buffers, strict=True):
        if buffer is not tensor:
            tensor.detach().copy_(buffer)


def move_dtype_of(tensor: torch.Tensor) -> torch.dtype:
    """Return a dtype of the same size that every transport supports, for tensors that are only moved."""
    if tensor.dtype.itemsize not in MOVE_DTYPES:
        raise TensorError(f"unsupported dtype: {tensor.dtype}, with elements of {tensor.dtype.itemsize} bytes")
    return MOVE_DTYPES[tensor.dtype.itemsize]


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype without the prefix "torch."."""
    return str(dtype).removeprefix("torch.")
