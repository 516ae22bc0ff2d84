"""A rule of one's own: each rank sends only the largest entries of its gradients."""

from dataclasses import dataclass
from typing import Any

from unisono.rules import BSP
from unisono.step.operations import allreduce
from unisono.step.program import Operation, Role, Task
from unisono.step.replica import Replica

SHARE = 0.05
"""Of the entries of a bucket, those that are sent."""


def exchange_largest(replica: Replica, task: Task, world: Any) -> None:
    sums = replica.sums(task.key)
    largest = sums.abs().topk(max(1, int(len(sums) * SHARE))).indices
    everyone = world.all_gather_object((largest, sums[largest]))
    sums.zero_()
    for indices, values in everyone:
        sums.index_add_(0, indices, values)
    world.allreduce(replica.flags(task.key))


LARGEST = Operation("largest", exchange_largest, allreduce().symbolic, allreduce().price, Role.COLLECTIVE)


@dataclass(frozen=True)
class Largest(BSP):
    def allreduce(self) -> Operation:
        return LARGEST
