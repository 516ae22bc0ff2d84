"""Sends and receives of step programs over MPI, with operations of a custom rule."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from unisono.engine.communicator_pool import CommunicatorPool
from unisono.mpi import MPI
from unisono.rules.sharded import all_gather, reduce_scatter
from unisono.step.play import Player
from unisono.step.program import COMMUNICATION, Operation, RankGroup, Role, Task, bucket, order
from unisono.world import World


def _send(replica: Any, task: Task, world: World) -> None:
    world.comm.Send(replica.mine.numpy(), task.peer)


def _receive(replica: Any, task: Task, world: World) -> None:
    status = MPI.Status()
    world.comm.Recv(replica.came.numpy(), MPI.ANY_SOURCE if task.peer is None else task.peer, status=status)
    replica.sources.append(status.Get_source())


SEND = Operation("send", _send, role=Role.SEND)
RECEIVE = Operation("receive", _receive, role=Role.RECEIVE)


def test_each_rank_sends_to_the_next_and_rank_0_receives_from_any(world: World) -> None:
    rank, size = world.rank, world.size
    replica = SimpleNamespace(mine=torch.full((5,), float(rank)), came=torch.full((5,), -1.0), sources=[])
    group, pool = RankGroup(tuple(range(size)), 0), CommunicatorPool(world.split(0))
    player = Player(pool, 1, "a test")
    tasks = [
        Task(SEND, 1, COMMUNICATION, (bucket(1),), (order(0),), group, peer=(rank + 1) % size),
        Task(RECEIVE, 2, COMMUNICATION, (), (bucket(2), order(0)), group, peer=(rank - 1) % size if rank else None),
    ]
    if size > 1:
        for ready in player.prepare(tuple(tasks)):
            player.play(ready, replica)
        player.wait()
        assert replica.came.eq((rank - 1) % size).all()
        assert replica.sources == [(rank - 1) % size]
    pool.close()


def test_a_bucket_is_scattered_and_gathered_in_place(world: World) -> None:
    flat, flags = torch.arange(11.0) * (world.rank + 1), torch.ones(2)
    replica = SimpleNamespace(sums=lambda _: flat, shards=SimpleNamespace(presence={1: flags}))
    for operation in (reduce_scatter(), all_gather()):
        assert operation.act is not None
        operation.act(replica, Task(operation, 1, COMMUNICATION), world)
    assert torch.equal(flat, torch.arange(11.0) * sum(range(1, world.size + 1)))
    assert torch.equal(flags, torch.full((2,), float(world.size)))
