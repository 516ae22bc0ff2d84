"""Times the allreduce of every algorithm, the MPI library, gloo and the bound, at every size, on a world's ranks.

The report is a table and a plot. Messages between two ranks, there and back, are timed apart (swCaffe's figure 6):

    rank 0   ── message ─▶     ◀─ message ──     32 times for short ones; a sample is half the time there and back
    rank 1

As a program it times Unisono's collectives, or gloo's, as `peer_program` times its library's (`against.py`):

    mpiexec -n 2 python -m unisono.bench.collectives ours|gloo OUTPUT SETTINGS
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from unisono.bench.peer_program import (
    BARRIER,
    COPY,
    GLOO,
    ORDINARY,
    SIZES,
    WINDOWS,
    Calls,
    TimedLibrary,
    time_calls,
    write_results,
)
from unisono.formats import counted, format_bytes, markdown_table
from unisono.initialize import init
from unisono.measure.timing import times, timing_of
from unisono.mpi import MPI
from unisono.network import NetworkError
from unisono.plan.collective_costs import CollectiveCase, simulate_schedule
from unisono.schedules import candidates
from unisono.torch_backend.rendezvous import address_towards, store_of
from unisono.transports.sockets import addresses_of_interfaces
from unisono.view.chart import Times, draw_times
from unisono.world import World

MAX_TRIALS = 31
"""Largest number of trials of each contender."""

TRIAL_SECONDS = 8.0
"""Seconds of trials for a size, in addition to the least number of each contender."""

AUTO, LIBRARY = "auto", "MPI library"
"""Contenders in addition to the algorithms, GLOO and COPY."""

ON_TENSOR = "MPI library, tensor"
"""The library on a tensor's memory, as programs with tensors call it; LIBRARY uses an array made beforehand."""

MAX_ON_TENSOR_BYTES = 64 << 10
"""Largest payload in bytes for which ON_TENSOR is timed too: there a tensor's overhead matters."""


def measure(
    world: World,
    sizes: Sequence[int] = SIZES,
    algorithms: Sequence[str] | None = None,
    rate: float | None = None,
    log: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Time the allreduce of float32 tensors, in place, all ranks together. Return the results as data for JSON.

    `sizes` are in bytes. `algorithms` are the ones to time; None for all that are worth it. `rate` is the speed of a
    node's link in bits per second, if known; otherwise the bound uses the table's measured speed. `log` gets a line for
    each size.
    """
    if algorithms is None and world.nodes == 1:
        algorithms = ["flat", "direct", "halving", "ring"]
    elif algorithms is None:
        algorithms = [*candidates("allreduce", world.placement), f"{AUTO} bfloat16", f"{AUTO} float16"]
    results: dict[str, Any] = {
        "ranks": world.size,
        "nodes": world.nodes,
        "supernodes": len(set(world.placement.supernodes)) or 1,
        "library": MPI.Get_library_version().splitlines()[0].strip(),
        "sizes": [],
    }
    with gloo_group(world):
        for nbytes in sizes:
            calls = contenders(world, nbytes, algorithms)
            seconds = times(world, calls, MAX_TRIALS, TRIAL_SECONDS)
            row: dict[str, Any] = {"bytes": nbytes, "bound_us": None, "contenders": {}}
            if world.nodes > 1:
                beta = 8 / rate if rate else float(world.table.network.beta)
                row["bound_us"] = 2 * (world.nodes - 1) / world.nodes * nbytes * beta * 1e6
                row["auto"] = world.table.choose("allreduce", world.placement, nbytes).algorithm
            for name, took in seconds.items():
                timing = {f"{end}_us": value * 1e6 for end, value in timing_of(took)._asdict().items()}
                row["contenders"][name] = {**timing, "simulated_us": _simulated(world, name, nbytes)}
            results["sizes"].append(row)
            best = min(row["contenders"].keys() - {COPY}, key=lambda name: float(row["contenders"][name]["median_us"]))
            log(f"{nbytes} B: fastest is {best}, {row['contenders'][best]['median_us'] / 1e3:.3f} ms")
    return results


def contenders(world: World, nbytes: int, algorithms: Sequence[str]) -> dict[str, Callable[[], object]]:
    """Return the calls to time, by name: each sums zeros over all ranks, in place."""
    count = nbytes // 4
    here, gloo, library = torch.zeros(count), torch.zeros(count), np.zeros(count, np.float32)
    calls: dict[str, Callable[[], object]] = {
        AUTO: lambda: world.allreduce(here),
        LIBRARY: lambda: world.comm.Allreduce(MPI.IN_PLACE, library),
        GLOO: lambda: dist.all_reduce(gloo),
    }
    if nbytes <= MAX_ON_TENSOR_BYTES:
        calls[ON_TENSOR] = lambda: world.comm.Allreduce(MPI.IN_PLACE, gloo.numpy())
    if world.nodes == 1:
        source = np.zeros(count, np.float32)
        calls[COPY] = lambda: np.copyto(library, source)
    for name in algorithms:
        base, _, wire = name.partition(" ")
        calls[name] = partial(world.allreduce, here, base, wire or None)
    return calls


def _simulated(world: World, name: str, nbytes: int) -> float | None:
    """Return the predicted time of a schedule by messages, in microseconds; None where there is no prediction."""
    if world.nodes == 1 or " " in name or name in (AUTO, LIBRARY, ON_TENSOR, GLOO):
        return None
    try:
        case = CollectiveCase("allreduce", world.placement, world.table)
        return simulate_schedule(case, name, nbytes).seconds * 1e6
    except NetworkError:
        return None


@contextmanager
def gloo_group(world: World) -> Iterator[None]:
    """Start gloo between the same ranks, over the interface by which other nodes reach rank 0; stop it at the end."""
    store, address = store_of(world)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(address_towards(address)))
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    try:
        yield
        world.comm.Barrier()
    finally:
        dist.destroy_process_group()


def interface_of(address: str) -> str:
    """Return the network interface that has an address; "lo" where none is found."""
    return next((name for name, assigned in addresses_of_interfaces().items() if assigned == address), "lo")


SHORT_PAYLOAD_BYTES = 256 << 10
"""Bytes up to which a payload counts as short in the plot."""


def table(results: Mapping[str, Any]) -> str:
    """Return a Markdown table: milliseconds of each contender by size, and ratios of `auto` to peers and bound."""
    names = list(results["sizes"][0]["contenders"])
    rows = []
    for row in results["sizes"]:
        median = {name: row["contenders"][name]["median_us"] / 1e3 for name in names if name in row["contenders"]}
        bound = bound_of(row)
        cells = [f"{median[name]:.3f}" if name in median else "" for name in names]
        ratios = [f"{median[peer] / median[AUTO]:.2f}" for peer in (LIBRARY, GLOO)]
        last = [f"{bound / 1e3:.3f}", *ratios, f"{median[AUTO] * 1e3 / bound:.2f}"] if bound else ["", *ratios, ""]
        rows.append([str(row["bytes"]), *cells, *last])
    header = ["bytes", *names, "bound", "library / auto", "gloo / auto", "auto / bound"]
    return "\n".join([f"{_setting(results)}; medians in ms", "", *markdown_table(header, rows, left=())])


def bound_of(row: Mapping[str, Any]) -> float | None:
    """Return the least microseconds for a size: by the links, or on one node by the memory; None where unknown."""
    if row["bound_us"] is not None:
        return float(row["bound_us"])
    copy = row["contenders"].get(COPY)
    return float(copy["median_us"]) if copy else None


def draw(results: Mapping[str, Any]) -> bytes:
    """Return the times of short payloads, and those of long ones over their bound, as SVG."""
    short = [row for row in results["sizes"] if row["bytes"] <= SHORT_PAYLOAD_BYTES]
    long = [row for row in results["sizes"] if row["bytes"] >= SHORT_PAYLOAD_BYTES and bound_of(row)]
    names = list(dict.fromkeys(name for row in results["sizes"] for name in row["contenders"] if name != COPY))
    lines = [{name: _times(rows, name, bounded) for name in names} for rows, bounded in ((short, False), (long, True))]
    return draw_times(lines[0], lines[1], (AUTO, LIBRARY, GLOO), f"allreduce, {_setting(results)}")


def _setting(results: Mapping[str, Any]) -> str:
    ranks, nodes, supernodes = (results[name] for name in ("ranks", "nodes", "supernodes"))
    on = f"{counted(ranks, 'rank')} on {counted(nodes, 'node')} in {counted(supernodes, 'supernode')}"
    return f"{on}, {results['library']}"


def _times(rows: Sequence[Mapping[str, Any]], name: str, bounded: bool) -> Times:
    """Return the seconds of a contender, or multiples of the bound."""
    timed = [row for row in rows if name in row["contenders"]]
    units = [(bound_of(row) or 1.0) if bounded else 1e6 for row in timed]
    ends = (
        [float(row["contenders"][name][end]) / unit for row, unit in zip(timed, units, strict=True)]
        for end in ("median_us", "low_us", "high_us")
    )
    return Times([row["bytes"] for row in timed], *ends)


def own_calls(world: World, payload: torch.Tensor, result: torch.Tensor) -> Calls:
    """Return Unisono's collectives, and the copy, which rank 0 makes alone."""
    return {
        "allreduce": lambda: world.allreduce(payload),
        "reduce_scatter": lambda: world.reduce_scatter(payload, out=result),
        "all_gather": lambda: world.all_gather(payload, result),
        "broadcast": lambda: world.broadcast(payload),
        "all_to_all": lambda: world.all_to_all(payload, out=result),
        "reduce": lambda: world.reduce(payload),
        BARRIER: world.barrier,
        COPY: (lambda: payload) if world.rank else (lambda: np.copyto(result.numpy(), payload.numpy())),
    }


def gloo_calls(payload: torch.Tensor, result: torch.Tensor) -> Calls:
    return {
        "allreduce": lambda: dist.all_reduce(payload),
        "reduce_scatter": lambda: dist.reduce_scatter_single(result, payload),
        "all_gather": lambda: dist.all_gather_single(result, payload),
        "broadcast": lambda: dist.broadcast(payload, 0),
        "all_to_all": lambda: dist.all_to_all_single(result, payload),
        "reduce": lambda: dist.reduce(payload, 0),
        BARRIER: dist.barrier,
    }


def main() -> None:
    """Time one of the two, and in ours the copy as well."""
    world, (name, path, text) = init(), sys.argv[1:]
    settings = json.loads(text)
    if name == GLOO:
        with gloo_group(world):
            rows = time_calls(world.comm, {GLOO: TimedLibrary(torch.zeros, gloo_calls, world.barrier)}, **settings)
        library = f"torch {torch.__version__}"
    else:
        calls, windows = partial(own_calls, world), partial(world.empty, dtype=torch.float32)
        # Not NumPy's: of its arrays below 512 KiB, the second lies 16 bytes behind a page of the first; copies are slow
        ordinary = TimedLibrary(torch.zeros, calls, world.barrier)
        ours = {ORDINARY: ordinary, WINDOWS: TimedLibrary(windows, calls, world.barrier)}
        rows = time_calls(world.comm, ours, **settings)
        rows += time_calls(world.comm, {COPY: ordinary}, **{**settings, "collectives": [COPY]})
        library = MPI.Get_library_version()
    write_results(world.comm, path, library, rows)


SAMPLES = 5
"""Samples of messages of each size; the first, before them, does not count."""

MESSAGES, MANY_UP_TO = [4 << power for power in range(0, 20, 2)], 64 << 10
"""Bytes of the messages, 4 bytes to 1 MiB; up to MANY_UP_TO bytes 32 are sent there and back in each sample, else 2."""


def measure_messages(world: World) -> list[dict[str, Any]]:
    """Return named samples of messages between ranks 0 and 1 by size: half the time there and back, bytes per second.

    The other ranks wait. Collective.
    """
    rows, comm = list[dict[str, Any]](), world.comm
    for size in MESSAGES:
        ball, turns, seconds = np.zeros(size, np.uint8), 32 if size <= MANY_UP_TO else 2, list[float]()
        for _ in range(1 + SAMPLES):
            world.barrier()
            begun = time.perf_counter()
            for sends in turns * (world.rank == 0, world.rank == 1) if world.rank < 2 else ():
                move = comm.Send if sends else comm.Recv
                move(ball, 1 - world.rank)
            seconds.append((time.perf_counter() - begun) / (2 * turns))
        taken = world.call_on_root(lambda: seconds[1:])  # noqa: B023  called at once
        name = f"message of {format_bytes(size)}"
        rows.append({"name": name, "unit": "ms", "samples": [1e3 * each for each in taken]})
        rows.append({"name": f"{name}, rate", "unit": "MB/s", "samples": [size / each / 1e6 for each in taken]})
    return rows


if __name__ == "__main__":
    main()
