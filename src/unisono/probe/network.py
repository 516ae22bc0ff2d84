"""Measured network: messages between pairs of nodes, and the collectives that a run makes, as `auto` makes them.

    message      first ──▶ second ──▶ first         one rank of each node, all pairs at once; half the time of both
    collective   a barrier, then each rank's seconds; the slowest rank counts

Payloads are in memory that the world gives, like buckets of gradients.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from unisono.mpi import MPI
from unisono.plan.measured_rows import FLOAT32_WIRE
from unisono.probe.probes import CollectiveProbe, MessageProbe, PreparedCall, take_no_part
from unisono.schedules.pieces import bounds
from unisono.transports.messages import wait
from unisono.wires import encoded_share
from unisono.world import World


@contextmanager
def prepare_message(probe: MessageProbe, world: World) -> Iterator[PreparedCall]:
    """Pair the nodes 0 and 1, 2 and 3, ...; with an odd number the last takes no part. Entered by all ranks."""
    is_leader = world.rank == world.placement.nodes[world.node][0]
    nodes: MPI.Intracomm = world.comm.Split(0 if is_leader else 1, world.node)  # type: ignore[assignment]
    peer = world.node ^ 1
    first, ball = world.node < peer, np.zeros(probe.bytes, np.uint8)

    def call() -> tuple[float]:
        start = time.perf_counter()
        for sends in (first, not first):
            wait(nodes.Isend(ball, peer) if sends else nodes.Irecv(ball, peer), _never_interrupted)
        return ((time.perf_counter() - start) / 2,)

    try:
        yield PreparedCall(call if is_leader and peer < world.nodes else take_no_part)
    finally:
        nodes.Free()


@contextmanager
def prepare_collective(probe: CollectiveProbe, world: World) -> Iterator[PreparedCall]:
    """Make the payload. Entered by all ranks."""
    payload, wire = world.empty(probe.bytes // 4, torch.float32), None if probe.wire == FLOAT32_WIRE else probe.wire
    start, stop = bounds(payload.numel(), world.size, world.rank)
    shard = torch.zeros(stop - start)

    def call() -> tuple[float]:
        begin = time.perf_counter()
        if probe.collective == "allreduce":
            world.allreduce(payload, wire=wire)
        elif probe.collective == "reduce_scatter":
            world.reduce_scatter(payload, wire=wire)
        else:
            world.all_gather(shard, payload, wire=wire)
        return (time.perf_counter() - begin,)

    sent = int(probe.bytes * encoded_share(wire))
    yield PreparedCall(call, world.table.choose(probe.collective, world.placement, sent, wire is not None).algorithm)


def _never_interrupted() -> None:
    """Do nothing: a measurement is not interrupted."""
