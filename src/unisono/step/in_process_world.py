"""World of ranks in one process: a collective is run by one thread for each member.

member 0 ─ act(replica 0, world 0) ┐
member 1 ─ act(replica 1, world 1) ┼─ all give their tensors, then each sums them in the order of ranks
member 2 ─ act(replica 2, world 2) ┘
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from unisono.schedules.pieces import bounds
from unisono.step.matching import Member
from unisono.wires import wire_of


class InProcessWorld:
    """World of one of several threads that stand for ranks. Sums are made in the order of ranks."""

    def __init__(self, rank: int, gathering: _Gathering) -> None:
        self.rank, self.size, self._gathering = rank, gathering.size, gathering

    def all_gather_object(self, mine: Any) -> list[Any]:
        """Return the objects of all ranks, in the order of ranks."""
        return self._gathering.gather(self.rank, mine)

    def allreduce(self, tensor: torch.Tensor, _: str = "auto", wire: str | None = None) -> torch.Tensor:
        """Sum a tensor over the ranks, in place, and return it. A wire rounds as `direct` does: each chunk twice."""
        total = torch.zeros_like(tensor)
        for one in self.all_gather_object(self._rounded(tensor.clone(), wire)):
            total += one
        return tensor.copy_(self._rounded(total, wire))

    def reduce_scatter(self, tensor: torch.Tensor, _: str = "auto", wire: str | None = None) -> torch.Tensor:
        """Return this rank's chunk of the sum over the ranks. A wire rounds each term."""
        total = torch.zeros_like(tensor)
        for one in self.all_gather_object(self._rounded(tensor.clone(), wire)):
            total += one
        return total[slice(*bounds(len(total), self.size, self.rank))]

    def all_to_all(self, tensor: torch.Tensor, _: str = "auto") -> torch.Tensor:
        """Return the chunks that the ranks have for this one; the tensor's p chunks are equal."""
        return torch.cat([one.chunk(self.size)[self.rank] for one in self.all_gather_object(tensor.clone())])

    def all_gather(self, shard: torch.Tensor, out: torch.Tensor, _: str = "auto") -> torch.Tensor:
        """Fill `out` with the shards of all ranks, and return it."""
        return out.copy_(torch.cat(self.all_gather_object(shard.clone())))

    def _rounded(self, tensor: torch.Tensor, wire: str | None) -> torch.Tensor:
        """Return a tensor whose chunks have been through a wire, in place."""
        if (encoding := wire_of(wire, tensor.dtype)) is not None:
            for rank in range(self.size):
                chunk = tensor.view(-1)[slice(*bounds(tensor.numel(), self.size, rank))]
                encoding.encode(chunk.numpy(), torch.empty(encoding.nbytes(len(chunk)), dtype=torch.uint8).numpy())
        return tensor

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        """Copy `root`'s tensor to every rank, in place, and return it."""
        return tensor.copy_(self.all_gather_object(tensor.clone())[root])

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self.all_gather_object(None)

    def swap(self, mine: torch.Tensor, came: torch.Tensor) -> None:
        """Send a tensor to the other one of a pair, and receive its tensor."""
        came.copy_(self.all_gather_object(mine.clone())[1 - self.rank])

    def send(self, mine: torch.Tensor) -> None:
        """Send a tensor to the other one of a pair, which receives."""
        self.all_gather_object(mine.clone())

    def receive(self, came: torch.Tensor) -> None:
        """Receive a tensor from the other one of a pair, which sends."""
        came.copy_(self.all_gather_object(None)[1 - self.rank])


class _Gathering:
    def __init__(self, size: int) -> None:
        self.size, self._given, self._barrier = size, list[Any]([None] * size), threading.Barrier(size)

    def gather(self, rank: int, mine: Any) -> list[Any]:
        self._given[rank] = mine
        self._barrier.wait()
        found = list(self._given)
        self._barrier.wait()
        return found

    def abort(self) -> None:
        self._barrier.abort()


def carry_out(replicas: Sequence[Any], together: Sequence[Member]) -> None:
    """Run a task; a collective runs with a thread for each member. Raises what a member raises."""
    act = together[0].task.operation.act
    if act is None:
        replicas[together[0].rank].outside(together[0].task)
        return
    gathering = _Gathering(len(together))
    errors: list[BaseException] = []

    def one_rank(place: int, member: Member) -> None:
        replica, operation = replicas[member.rank], member.task.operation
        try:
            with torch.no_grad():
                operation.act(replica, member.task, InProcessWorld(place, gathering))  # type: ignore[misc]
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            errors.append(error)
            gathering.abort()

    threads = [threading.Thread(target=one_rank, args=pair) for pair in enumerate(together)]
    if len(threads) == 1:
        one_rank(0, together[0])
    else:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise next((one for one in errors if not isinstance(one, threading.BrokenBarrierError)), errors[0])
