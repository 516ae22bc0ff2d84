"""Memory of tensors: as MPI takes it, with the MPI type of their elements; and what several of them share.

A collective that writes into memory which it reads later would read what it has overwritten:

    input     | a0 | a1 | a2 |
    output         | .. |            rank 1's own chunk of the input: in place, as NCCL documents it
    output       | .. |              a part of two chunks: refused

    outputs   | b0 | b1 | b2 |       columns of one matrix share no memory, though their first and last bytes cross
    outputs   | b0 | b0 | b2 |       one tensor given twice, or an expanded one: refused
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import pairwise

import numpy as np
import torch

from unisono.errors import TensorError
from unisono.mpi import MPI
from unisono.transports.arithmetic import MOVABLE_DTYPES, Array

MPI_TYPES = {dtype: MPI.Datatype.fromcode(numbers.char) for dtype, numbers in MOVABLE_DTYPES.items()}
MPI_TYPES[torch.bool] = MPI.UINT8_T  # bytes of 0 or 1

MOVE_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Dtype that replaces any dtype of that many bytes when nothing is reduced."""


def nbytes_of(tensor: torch.Tensor) -> int:
    """Return the size of a tensor in bytes. Raises TensorError for one that is not in plain CPU memory."""
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        raise TensorError(f"unsupported tensor: {tensor.layout} on {tensor.device}; convert it to a dense CPU tensor")
    if tensor.is_quantized:
        raise TensorError("unsupported tensor: quantized, each with a scale of its own; give its int_repr()")
    nbytes = int(tensor.nbytes)
    if nbytes and not tensor.data_ptr():
        kind = type(tensor).__name__
        raise TensorError(f"unsupported tensor: a {kind} has no memory of its own; give its local tensor")
    return nbytes


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
    return tensor if is_plain(tensor) else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def copy_back(tensors: Iterable[torch.Tensor], buffers: Iterable[torch.Tensor]) -> None:
    """Copy each buffer from `receive_buffer` into its tensor, where they differ."""
    for tensor, buffer in zip(tensors, buffers, strict=True):
        put_back(tensor, buffer)


def put_back(tensor: torch.Tensor, result: torch.Tensor) -> None:
    """Copy a plain result of as many elements into `tensor`, unless it lies there."""
    if result.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(result.view(tensor.shape))


def move_dtype_of(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype of the same size that every transport supports, for tensors that are only moved."""
    if dtype.itemsize not in MOVE_DTYPES:
        raise TensorError(f"unsupported dtype: {dtype}, with elements of {dtype.itemsize} bytes")
    return MOVE_DTYPES[dtype.itemsize]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


MAX_SEARCH_STEPS = 1 << 16
"""Step limit of NumPy's search for an element that two strided tensors share; beyond it they count as sharing."""


class _StridedArray:
    """Array interface of a tensor's elements for NumPy: only their addresses count."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        strides = tuple(stride * size for stride in tensor.stride())
        shape, data = tuple(tensor.shape), (tensor.data_ptr(), True)
        self.__array_interface__ = {"shape": shape, "strides": strides, "typestr": f"|V{size}", "data": data}


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of the first byte and of the byte after the last; (0, 0) for an empty tensor."""
    if tensor.is_contiguous():
        start, nbytes = tensor.data_ptr(), tensor.nbytes
        return (start, start + nbytes) if nbytes else (0, 0)
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def is_writable(tensor: torch.Tensor) -> bool:
    """Return True if no two elements share memory; those of an expanded tensor do."""
    if tensor.is_contiguous() or tensor.numel() < 2:
        return True
    dimensions = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    if dimensions[0][0] == 0:
        return False
    reach = 0  # elements from the first to the last of the dimensions seen
    nested = True
    for stride, size in dimensions:
        nested = nested and stride > reach
        reach += stride * (size - 1)
    if nested:
        return True
    offsets = torch.arange(reach + 1, device="cpu").as_strided(tensor.shape, tensor.stride())
    return bool(np.unique(offsets.numpy()).size == tensor.numel())


def share_memory(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return True if some element of one tensor lies in the memory of the other."""
    (start, stop), (low, high) = extent(left), extent(right)
    if stop <= low or high <= start:
        return False
    if left.is_contiguous() and right.is_contiguous():
        return True
    try:
        arrays = np.asarray(_StridedArray(left)), np.asarray(_StridedArray(right))
        return np.shares_memory(*arrays, max_work=MAX_SEARCH_STEPS)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def same_elements(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return True if two tensors are the same elements, in the same order, in the same memory."""
    if left.data_ptr() != right.data_ptr() or left.is_conj() != right.is_conj() or left.is_neg() != right.is_neg():
        return False
    if left.is_contiguous() and right.is_contiguous():
        return left.nbytes == right.nbytes
    return left.shape == right.shape and left.stride() == right.stride()


def is_chunk(chunk: torch.Tensor, full: torch.Tensor, start: int) -> bool:
    """Return True if `chunk` is the elements of `full` from `start` on."""
    place = full.data_ptr() + start * full.element_size()
    return is_plain(chunk) and is_plain(full) and chunk.data_ptr() == place


def find_aliases(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor] = (),
    in_place: Collection[tuple[int, int]] = (),
    allowed: Callable[[torch.Tensor, torch.Tensor], bool] = same_elements,
) -> str:
    """Return a description of two tensors that share memory, at least one of them an output; empty if none do.

    `in_place` lists (output index, input index) pairs that may share memory if `allowed(output, input)` is true.
    """
    tensors, read = [*inputs, *outputs], len(inputs)
    ranges = sorted((*extent(tensor), index) for index, tensor in enumerate(tensors))
    if all(lower[1] <= upper[0] for lower, upper in pairwise(ranges)):
        return ""
    before: list[tuple[int, int]] = []  # those that reach to the next one
    for start, stop, index in ranges:
        before = [(end, earlier) for end, earlier in before if end > start]
        for _, earlier in before:
            first, last = sorted((earlier, index))
            kept = first < read and (last - read, first) in in_place and allowed(tensors[last], tensors[first])
            if last >= read and not kept and share_memory(tensors[last], tensors[first]):
                labels = [f"output {at - read}" if at >= read else f"input {at}" for at in (first, last)]
                return " and ".join(sorted(labels, reverse=True))
        before.append((stop, index))
    return ""
