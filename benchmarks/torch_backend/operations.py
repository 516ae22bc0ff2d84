"""Times torch.distributed's operations by unisono and by gloo, between the same ranks, by turns.

Started on the ranks by run.py:  operations.py OUTPUT LARGEST_BYTES
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import unisono
from unisono.bench.collectives import interface_of
from unisono.measure.timing import times, timing_of
from unisono.torch_backend.rendezvous import address_towards
from unisono.world import World

SIZES = (4, 256, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 100_000_000)
"""Bytes of an operation's larger tensor."""

MOST, BUDGET = 31, 2.0
"""Most trials of each contender, of 3 or more, and seconds of trials for each size."""

Call = Callable[[], object]


def calls(operation: str, nbytes: int, group: dist.ProcessGroup) -> Call:
    """One operation on a tensor of so many bytes, or the next that the ranks divide."""
    ranks = dist.get_world_size()
    count = -(-nbytes // 4 // ranks) * ranks
    full, part = torch.zeros(count), torch.zeros(count // ranks)
    if operation == "all_reduce":
        tensor = torch.zeros(nbytes // 4)
        return lambda: dist.all_reduce(tensor, group=group)
    if operation == "all_gather":
        return lambda: dist.all_gather_single(full, part, group)
    if operation == "reduce_scatter":
        return lambda: dist.reduce_scatter_single(part, full, group=group)
    received = torch.zeros(count)
    return lambda: dist.all_to_all_single(received, full, group=group)


OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def gloo(world: World) -> dist.ProcessGroup:
    """gloo's group of the same ranks, over the interface that leads to the other nodes."""
    hosts = world.all_gather_object(socket.gethostname())
    others = [host for host in hosts if host != hosts[world.rank]]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(address_towards(others[0] if others else "127.0.0.1")))
    return dist.new_group(backend="gloo")


def measure(world: World, largest: int) -> list[dict[str, object]]:
    """A row for each operation and size."""
    contenders = {"unisono": dist.group.WORLD, "gloo": gloo(world)}
    rows: list[dict[str, object]] = []
    for operation in OPERATIONS:
        for nbytes in (size for size in SIZES if size <= largest):
            made = {name: calls(operation, nbytes, group) for name, group in contenders.items()}
            if world.nodes == 1:
                made["copy"] = partial(np.copyto, np.zeros(nbytes, np.uint8), np.ones(nbytes, np.uint8))
            seconds = times(world, made, MOST, BUDGET)
            medians = {name: timing_of(took) for name, took in seconds.items()}
            row: dict[str, object] = {"operation": operation, "bytes": nbytes}
            for name, timing in medians.items():
                row[name] = [round(value * 1e6, 1) for value in (timing.median, timing.low, timing.high)]
            rows.append(row)
            if world.rank == 0:
                ratio = medians["gloo"].median / medians["unisono"].median
                print(
                    f"{operation} {nbytes} B: {medians['unisono'].median * 1e3:.3f} ms, gloo {ratio:.2f} x", flush=True
                )
    return rows


def main(output: str, largest: str) -> None:
    """Measure and write."""
    world = unisono.init()
    dist.init_process_group("unisono")
    rows = measure(world, int(largest))
    if world.rank == 0:
        Path(output).write_text(json.dumps({"ranks": world.size, "nodes": world.nodes, "rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
