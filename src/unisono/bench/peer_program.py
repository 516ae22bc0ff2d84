"""Times collectives on the ranks of one contender. As a program: those of an MPI library, in NumPy memory.

    mpiexec -n 2 python -m mpi4py peer_program.py NAME OUTPUT SETTINGS        by the mpiexec and Python of that library

It imports mpi4py and NumPy alone, so that it runs where neither Unisono nor PyTorch is installed. `collectives` times
other contenders by the same `time_calls`.

The payload is written before every call, as a training step writes its gradients: otherwise it stays in the cache of
the rank that summed it, and sums in shared memory look up to twice as fast.

after a barrier    the slowest rank's time of each call, which follows a write and a barrier; the median
back to back       the slowest rank's time of many writes and calls, less that of as many writes alone; the mean.
                   Payloads of up to MAX_UNWRITTEN_BYTES are not written there: the clock cannot separate such writes
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

AFTER_A_BARRIER, BACK_TO_BACK = "after a barrier", "back to back"
TIMINGS = (AFTER_A_BARRIER, BACK_TO_BACK)

OURS, ORDINARY, WINDOWS = "ours", "ordinary", "windows"
"""Unisono, and the memory in which it is timed: ordinary tensors, and those of `world.empty`."""

GLOO = "gloo"

COPY = "copy"
"""Copy of the payload, the bound on one node; here by rank 0 alone, timed like a collective."""

SIZES = (4, 64, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 8 << 20, 16 << 20, 64 << 20)
"""Payloads in bytes."""

BARRIER = "barrier"
"""Collective without a payload: one row, of 0 bytes."""

COLLECTIVES = ("allreduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "reduce", BARRIER)

MAX_UNWRITTEN_BYTES = 4 << 10

SETTLING_SECONDS = 0.3
"""Seconds of barriers before the first call, in which the kernel distributes the ranks over the cores."""

WARMUP_CALLS = 10
MIN_CALLS, MAX_CALLS = 5, 2000
TIMING_SECONDS = 0.08
"""Seconds of calls at a size, with writes and barriers, and back to back; the number of calls has its own limits."""

Calls = Mapping[str, Callable[[], Any]]


class TimedLibrary(NamedTuple):
    """Library whose collectives are timed."""

    memory: Callable[[int], Any]
    """Returns a zeroed array or tensor of so many float32 numbers."""
    calls: Callable[[Any, Any], Calls]
    """Returns the call of each collective for a payload, and for memory of the result where it lies elsewhere."""
    barrier: Callable[[], Any]
    """Barrier before each timed call: the library's own, since ranks leave another's at other moments."""


class Case(NamedTuple):
    """Collective of a contender, on one payload."""

    payload: Any
    value: float
    """Number that is written to all of the payload before a call."""
    call: Callable[[], Any]
    result: Any
    expected: float
    """Number that all of the result consists of."""
    barrier: Callable[[], Any]


def make_case(contender: TimedLibrary, collective: str, nbytes: int, rank: int, ranks: int) -> Case:
    """Return a collective of `nbytes`, the whole vector that is reduced, gathered or sent; chunks are rounded up."""
    chunk = -(-nbytes // 4 // ranks)
    count = chunk * ranks if collective in ("reduce_scatter", "all_gather", "all_to_all") else nbytes // 4
    payload = contender.memory(chunk if collective == "all_gather" else count)
    received = {"reduce_scatter": chunk, "all_gather": count, "all_to_all": count, COPY: count}
    result = contender.memory(received[collective]) if collective in received else payload
    call = contender.calls(payload, result)[collective]
    value = 0.0 if collective == "broadcast" and rank else 1.0
    expected = float(ranks) if collective in ("allreduce", "reduce_scatter", "reduce") else 1.0
    known = np.asarray(result)[: 0 if collective == "reduce" and rank else None]  # others than the root: undefined
    return Case(np.asarray(payload), value, call, known, expected, contender.barrier)


def time_calls(
    comm: Any, contenders: Mapping[str, TimedLibrary], collectives: Sequence[str], sizes: Sequence[int]
) -> list[dict[str, Any]]:
    """Return the microseconds of every contender's collectives at every size in bytes. All ranks call it together."""
    rows = list[dict[str, Any]]()
    settled, barrier = time.perf_counter() + SETTLING_SECONDS, next(iter(contenders.values())).barrier
    while not all(comm.allgather(time.perf_counter() > settled)):
        barrier()
    for collective in collectives:
        for nbytes in (0,) if collective == BARRIER else sizes:
            for name, contender in contenders.items():
                case = make_case(contender, collective, nbytes, comm.rank, comm.size)
                row = {"contender": name, "collective": collective, "bytes": nbytes}
                label = f"{name}: {collective} of {nbytes} bytes"
                if not rows:  # the first calls of a process are slow: one case more, which does not count
                    time_case(comm, case, label)
                rows.append({**row, **time_case(comm, case, label)})
    return rows


def time_case(comm: Any, case: Case, what: str) -> dict[str, float]:
    """Return the microseconds of a call by timing. Raises ValueError for a wrong result."""
    fill, call, value = case.payload.fill, case.call, case.value
    fill(value)
    returned = call()
    result = case.result if returned is None else np.asarray(returned)
    if not (result == case.expected).all():
        raise ValueError(f"rank {comm.rank}: {what}: the result has other numbers than {case.expected:g}")
    begun = time.perf_counter()
    _each(case, WARMUP_CALLS)
    warm = max(comm.allgather((time.perf_counter() - begun) / WARMUP_CALLS))
    count = max(MIN_CALLS, min(MAX_CALLS, int(TIMING_SECONDS / warm)))
    slowest = np.max(comm.allgather(_each(case, count)), axis=0)
    in_row = max(comm.allgather(_in_row(comm, case, count)))
    longer = min(MAX_CALLS, int(TIMING_SECONDS / max(in_row, 1e-9)))
    if longer > count:  # they take a few milliseconds, as long as another program may have the core
        in_row = max(comm.allgather(_in_row(comm, case, longer)))
    return {AFTER_A_BARRIER: float(np.median(slowest)) * 1e6, BACK_TO_BACK: in_row * 1e6}


def _in_row(comm: Any, case: Case, count: int) -> float:
    """Return the seconds of a call on this rank, of `count` back to back."""
    fill, call, value = case.payload.fill, case.call, case.value
    written = case.payload.nbytes > MAX_UNWRITTEN_BYTES
    comm.Barrier()
    begun = time.perf_counter()
    for _ in range(count):
        if written:
            fill(value)
        call()
    called = time.perf_counter()
    for _ in range(count * written):
        fill(value)
    filled = time.perf_counter() - called if written else 0.0
    return (called - begun - filled) / count


def _each(case: Case, count: int) -> list[float]:
    """Return the seconds of `count` calls on this rank, each after a write and a barrier."""
    seconds = []
    for _ in range(count):
        case.payload.fill(case.value)
        case.barrier()
        begun = time.perf_counter()
        case.call()
        seconds.append(time.perf_counter() - begun)
    return seconds


def write_results(comm: Any, path: str, library: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rank 0's results, with the name of the library."""
    if comm.rank == 0:
        name = " ".join(library.splitlines()[0].split(",")[0].split())
        Path(path).write_text(json.dumps({"library": name, "rows": rows}))


def main() -> None:
    """Time the MPI library of this Python environment."""
    from mpi4py import MPI  # noqa: PLC0415 - this starts MPI, which Unisono's ranks do themselves

    comm, (name, path, settings) = MPI.COMM_WORLD, sys.argv[1:]

    def calls(payload: Any, result: Any) -> Calls:
        return {
            "allreduce": lambda: comm.Allreduce(MPI.IN_PLACE, payload),
            "reduce_scatter": lambda: comm.Reduce_scatter_block(payload, result),
            "all_gather": lambda: comm.Allgather(payload, result),
            "broadcast": lambda: comm.Bcast(payload),
            "all_to_all": lambda: comm.Alltoall(payload, result),
            "reduce": lambda: comm.Reduce(payload if comm.rank else MPI.IN_PLACE, payload),
            BARRIER: comm.Barrier,
        }

    contender = TimedLibrary(lambda count: np.zeros(count, np.float32), calls, comm.Barrier)
    rows = time_calls(comm, {name: contender}, **json.loads(settings))
    write_results(comm, path, MPI.Get_library_version(), rows)


if __name__ == "__main__":
    main()
