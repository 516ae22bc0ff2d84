"""Collectives of memory on a device, which a CUDA-aware MPI library moves as it is; the device computes the sums.

Allreduce (ASA of Theano-MPI, section 3.2), 4 ranks:

    rank 0   a0 a1 a2 a3              sum of chunk 0 on the device              s0 s1 s2 s3
    rank 1   b0 b1 b2 b3   exchange   sum of chunk 1              all-gather    s0 s1 s2 s3
    rank 2   c0 c1 c2 c3   ───────▶   sum of chunk 2              ─────────▶    s0 s1 s2 s3
    rank 3   d0 d1 d2 d3              sum of chunk 3                            s0 s1 s2 s3

2 rounds, 2n(p-1)/p bytes sent by each rank. Sums are computed in float32 or wider, in the order of the ranks, by the
chunk's owner alone: all ranks get the same bits. With a wire of 16 bits (ASA16) both rounds carry half as many bytes.

A library that was not built for GPUs would read a device address as a host address and crash, so it is asked first. One
that was may still fail or be slow with the installed driver, so a first sum is compared and timed (`reaches`), unless
the user asks for a transport.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch

from unisono.call import call_of
from unisono.collectives.checks import Checks, check_chunk
from unisono.collectives.group import Group
from unisono.collectives.payload import flat_of, memory_of, name_of, share_memory
from unisono.device import is_on_host, module_of
from unisono.errors import UsageError
from unisono.mpi import MPI, allreduce_min
from unisono.schedules.pieces import bounds

COMBINE: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
}
"""Functions of two tensors, by op."""

WIRE_DTYPES = {None: None, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""Dtypes in which numbers travel, by wire; None for the tensor's own."""

MIN_DIRECT_BYTES = 4 << 20
"""Smallest tensor that is summed on the device, in bytes: a message of a device's memory takes hundreds of us."""

PROBE_BYTES = 8 << 20
"""Bytes of the sum by which a library is tried."""

VARIABLE = "UNISONO_DEVICE_TRANSPORT"
"""Environment variable of rank 0: "staged" or "direct"; else what is tried and faster."""

STAGED, DIRECT = "staged", "direct"

TAG = 1
"""Tag of all messages; one collective of a group is under way at a time."""


def mpi_reports_gpu_support() -> bool:
    """Return True if the MPI library reports support for GPU memory (an extension of MPICH and Open MPI)."""
    query: Callable[[], int] | None = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", None)
    return query is not None and bool(query())


def reaches(group: Group, device: torch.device, staged: Callable[[torch.Tensor], object]) -> bool:
    """Return True where MPI moves the memory of a device rightly, and a sum so is faster than a `staged` one.

    Called by all ranks together. The first call for a kind of device tries both, unless rank 0's environment asks for
    one. Raises UsageError on all ranks for one that is not there.
    """
    if device.type not in group.reached:
        asked = group.comm.bcast(os.environ.get(VARIABLE, ""))
        if asked not in ("", STAGED, DIRECT):
            raise UsageError(f'{VARIABLE} is "{asked}"; set it to "{STAGED}" or "{DIRECT}", or unset it')
        able = asked != STAGED and device.type == "cuda" and mpi_reports_gpu_support()
        right = bool(allreduce_min(group.comm, able)) and _sums_rightly(group, device)
        if asked == DIRECT and not right:
            library = MPI.Get_library_version().splitlines()[0].split(",")[0]
            raise UsageError(
                f"{VARIABLE}={DIRECT}: {library} does not move memory of {device.type} rightly here; take a library "
                "that is built for it, or unset the variable"
            )
        group.reached[device.type] = right and (asked == DIRECT or _is_faster(group, device, staged))
    return group.reached[device.type]


def _sums_rightly(group: Group, device: torch.device) -> bool:
    ones = torch.ones(PROBE_BYTES // 4, device=device)
    allreduce_direct(group, ones, "sum")
    return bool(allreduce_min(group.comm, bool((ones == group.size).all())))


def _is_faster(group: Group, device: torch.device, staged: Callable[[torch.Tensor], object]) -> bool:
    ones = torch.ones(PROBE_BYTES // 4, device=device)
    direct = _seconds(group, device, partial(allreduce_direct, group, ones, "sum"))
    return direct < _seconds(group, device, partial(staged, ones))


def _seconds(group: Group, device: torch.device, act: Callable[[], object]) -> float:
    """Return the seconds of a second call on the slowest rank."""
    module, took = module_of(device), 0.0
    for _ in range(2):
        module.synchronize(device)
        group.comm.Barrier()
        began = time.perf_counter()
        act()
        module.synchronize(device)
        took = time.perf_counter() - began
    slowest = np.array([took])
    group.comm.Allreduce(MPI.IN_PLACE, slowest, MPI.MAX)
    return float(slowest[0])


def allreduce_direct(group: Group, tensor: torch.Tensor, op: str, wire: str | None = None) -> None:
    """Reduce `tensor` over all ranks by `op`, in place."""
    flat = flat_of(tensor)
    coded = flat if (dtype := WIRE_DTYPES[wire]) is None or not flat.is_floating_point() else flat.to(dtype)
    call = call_of(f"all_reduce({tensor.numel()} x {name_of(tensor.dtype)}, {op}, wire {wire}, of a device)")
    with group.enter_library_call(call):
        own = _sum_chunk(group, coded, op)
        _exchange(group, [own] * group.size, _chunks(group, coded))
    if coded.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            tensor.copy_(coded.view(tensor.shape))
        _settle(tensor)  # another stream may read it next


def reduce_scatter_direct(group: Group, tensor: torch.Tensor, part: torch.Tensor, op: str) -> None:
    """Reduce `tensor` over all ranks by `op`; `part` of rank r receives the r-th of its equal parts.

    Raises TensorError where `part` shares memory with `tensor` in any other place than that part.
    """
    with Checks(group, "reduce_scatter"):
        check_chunk(group, "reduce_scatter", part, tensor, group.rank * part.numel())
    given = tensor.clone() if share_memory(part, tensor) else tensor
    call = call_of(f"reduce_scatter({tensor.numel()} x {name_of(tensor.dtype)}, {op}, of a device)")
    with group.enter_library_call(call):
        part.copy_(_sum_chunk(group, flat_of(given), op).view(part.shape))
        _settle(part)


def all_gather_direct(group: Group, part: torch.Tensor, out: torch.Tensor) -> None:
    """Gather every rank's `part` into `out`, side by side.

    Raises TensorError where `part` shares memory with `out` in any other place than its own.
    """
    with Checks(group, "all_gather"):
        check_chunk(group, "all_gather", part, out, group.rank * part.numel())
    call = call_of(f"all_gather({out.numel()} x {name_of(out.dtype)}, of a device)")
    with group.enter_library_call(call):
        _exchange(group, [flat_of(part)] * group.size, _chunks(group, flat_of(out)))


def broadcast_direct(group: Group, tensor: torch.Tensor, root: int) -> None:
    """Copy the root's `tensor` to all ranks, in place."""
    call = call_of(f"broadcast({tensor.numel()} x {name_of(tensor.dtype)}, from {root}, of a device)")
    with group.enter_library_call(call):
        _settle(tensor)
        group.wait_for(group.comm.Ibcast([memory_of(tensor), MPI.BYTE], root), tensor)


def _chunks(group: Group, flat: torch.Tensor) -> list[torch.Tensor]:
    return [flat[slice(*bounds(len(flat), group.size, rank))] for rank in range(group.size)]


def _sum_chunk(group: Group, flat: torch.Tensor, op: str) -> torch.Tensor:
    """Return this rank's chunk of the reduction, which replaces its own in `flat`."""
    chunks = _chunks(group, flat)
    own = chunks[group.rank]
    came = [own if rank == group.rank else torch.empty_like(own) for rank in range(group.size)]
    _exchange(group, chunks, came)
    wide = torch.float32 if own.dtype in (torch.float16, torch.bfloat16) else own.dtype
    total = came[0].to(wide, copy=True)
    for one in came[1:]:
        total = COMBINE[op](total, one)
    own.copy_(total)
    return own


def _exchange(group: Group, sends: list[torch.Tensor], receives: list[torch.Tensor]) -> None:
    """Send sends[d] to rank d, and receive receives[s] from rank s; the own ones are copied where they differ."""
    own = group.rank
    if receives[own].data_ptr() != sends[own].data_ptr():
        receives[own].copy_(sends[own])
    _settle(sends[own])
    others = [(own + distance) % group.size for distance in range(1, group.size)]
    requests = [
        group.comm.Irecv([memory_of(receives[rank]), MPI.BYTE], rank, TAG) for rank in others if receives[rank].numel()
    ]
    requests += [
        group.comm.Isend([memory_of(sends[rank]), MPI.BYTE], rank, TAG) for rank in others if sends[rank].numel()
    ]
    for request in requests:
        group.wait_for(request, *sends, *receives)


def _settle(tensor: torch.Tensor) -> None:
    """Wait until this thread's stream has computed its tensors, since the MPI library knows no streams."""
    if not is_on_host(tensor):
        module_of(tensor.device).current_stream(tensor.device).synchronize()


def is_direct(group: Group, tensor: torch.Tensor, op: str, wire: str | None) -> bool:
    """Return True for a sum that `allreduce_direct` knows, of a tensor that is long enough, where MPI reaches it."""
    dtype = tensor.dtype
    known = op in COMBINE and wire in WIRE_DTYPES and dtype is not torch.bool and not dtype.is_complex
    return known and tensor.nbytes >= MIN_DIRECT_BYTES and group.reached.get(tensor.device.type, False)
