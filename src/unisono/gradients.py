"""Gradients side by side in flat buffers, exchanged when the backward pass ends.

    parameters   w0 w1 | w2 w3 w4 | w5          in the order in which they are declared
    buckets      [w5 w4 w3] [w2 w1] [w0]        packed from the last, whose gradients come first (swCaffe 5.1)

Every parameter's `.grad` is a view of its bucket. A bucket lies in memory that the ranks of the node share, where they
share one, so that the exchange copies nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import Variable

from unisono.errors import UsageError
from unisono.world import World

ALIGNMENT = 64
"""Bytes at whose multiples each gradient begins: a cache line, and what vector instructions like."""

ATTACHED = "_unisono_gradients"
"""The attribute of a model under which its Gradients are found."""


class Member(NamedTuple):
    """A parameter's place in a bucket, in elements."""

    parameter: int
    start: int
    length: int


class Bucket(NamedTuple):
    """Gradients of one dtype that travel together."""

    dtype: torch.dtype
    members: tuple[Member, ...]
    length: int


def plan_buckets(parameters: Sequence[tuple[int, torch.dtype]], largest: int) -> list[Bucket]:
    """The buckets for parameters of these (length, dtype), packed from the last.

    A bucket is closed before it grows above `largest` bytes; a parameter above that has one to itself.
    """
    open_members: dict[torch.dtype, list[Member]] = {}
    lengths: dict[torch.dtype, int] = {}
    closed: list[Bucket] = []
    for number in reversed(range(len(parameters))):
        length, dtype = parameters[number]
        padded = -(-length * dtype.itemsize // ALIGNMENT) * ALIGNMENT // dtype.itemsize
        members = open_members.setdefault(dtype, [])
        if members and (lengths[dtype] + padded) * dtype.itemsize > largest:
            closed.append(Bucket(dtype, tuple(members), lengths[dtype]))
            members = open_members[dtype] = []
        start = lengths[dtype] if members else 0
        members.append(Member(number, start, length))
        lengths[dtype] = start + padded
    closed += [Bucket(dtype, tuple(members), lengths[dtype]) for dtype, members in open_members.items()]
    return closed


class Gradients:
    """The gradients of a model's parameters, averaged over the ranks of `world` whenever a backward pass ends."""

    def __init__(self, model: torch.nn.Module, world: World, algorithm: str, bucket_bytes: int) -> None:
        if hasattr(model, ATTACHED):
            raise UsageError("the model is parallel already: call unisono.parallel once")
        self._world, self._algorithm = world, algorithm
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.buckets = plan_buckets([(p.numel(), p.dtype) for p in self.parameters], bucket_bytes)
        self.flats = [world.empty(bucket.length, bucket.dtype) for bucket in self.buckets]
        self.views: list[torch.Tensor] = [torch.empty(0)] * len(self.parameters)
        for bucket, flat in zip(self.buckets, self.flats, strict=True):
            for number, start, length in bucket.members:
                self.views[number] = flat[start : start + length].view(self.parameters[number].shape)
        self.samples = 0.0
        """Samples whose gradients are in the buckets and have not been averaged yet."""
        self.waiting = 0.0
        """Seconds spent until the last rank came, since the start."""
        self.communicating = 0.0
        """Seconds spent on the exchange itself, since the start."""
        self._pending = False
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view
            parameter.register_post_accumulate_grad_hook(self._hook(view))  # type: ignore[no-untyped-call]
        model.register_forward_pre_hook(self._count, with_kwargs=True)
        setattr(model, ATTACHED, self)

    def zero(self) -> None:
        """Set all gradients to zero, keeping them where they are (an optimizer's `zero_grad` may drop them)."""
        for flat in self.flats:
            flat.zero_()
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view

    def exchange(self) -> None:
        """Average the gradients over all ranks, each rank's weighted by its samples; one with none gives nothing.

        The backward pass does this when it ends. A rank that has no backward pass in a step calls it instead.
        """
        start = time.perf_counter()
        total = torch.tensor([self.samples], dtype=torch.float64)
        self._world.allreduce(total)
        together = time.perf_counter()
        weight = self.samples / float(total) if float(total) else 0.0
        for flat in self.flats:
            flat.mul_(weight)
            self._world.allreduce(flat, self._algorithm)
        self.samples = 0.0
        self.waiting += together - start
        self.communicating += time.perf_counter() - together

    def _count(self, _: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Before a forward pass: its samples are the length of the first tensor's first dimension."""
        if torch.is_grad_enabled():
            tensors = (value for value in (*inputs, *named.values()) if isinstance(value, torch.Tensor))
            first = next(tensors, None)
            self.samples += first.shape[0] if first is not None and first.dim() else 1

    def _hook(self, view: torch.Tensor) -> Callable[[torch.Tensor], None]:
        """What happens when a parameter's gradient is complete."""

        def complete(parameter: torch.Tensor) -> None:
            if parameter.grad is not view:  # the optimizer dropped it, and autograd made another
                if parameter.grad is not None:
                    view.copy_(parameter.grad)
                parameter.grad = view
            if not self._pending:
                self._pending = True
                Variable._execution_engine.queue_callback(self._finish)

        return complete

    def _finish(self) -> None:
        """The backward pass has ended."""
        self._pending = False
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is None:  # dropped, and not part of this pass
                view.zero_()
                parameter.grad = view
        self.exchange()


def gradients_of(model: torch.nn.Module) -> Gradients | None:
    """The Gradients of a model that was made parallel; None for another."""
    found: Gradients | None = getattr(model, ATTACHED, None)
    return found
