"""Gradients side by side in flat buffers, exchanged when the backward pass ends.

    parameters   w0 w1 | w2 w3 w4 | w5          in the order in which they are declared
    buckets      [w5 w4 w3] [w2 w1] [w0]        packed from the last, whose gradients come first (swCaffe 5.1)

Every parameter's `.grad` is a view of its bucket. A bucket lies in memory that the ranks of the node share, where they
share one, so that the exchange copies nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import Variable

from unisono.errors import UsageError
from unisono.world import World

ALIGNMENT = 64
"""Bytes at whose multiples each gradient begins: a cache line, and what vector instructions like."""

ATTACHED = "_unisono"
"""The attribute of a model under which its Attachment is found."""


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


class Attachment:
    """Ties a model to its Gradients, and counts samples before its forward passes. Copies of the model are not tied."""

    def __init__(self, gradients: Gradients | None) -> None:
        self.gradients = gradients

    def __call__(self, model: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Before a forward pass."""
        if self.gradients is not None and model.training and torch.is_grad_enabled():
            self.gradients.count(_first_tensor((*inputs, *named.values())))

    def __deepcopy__(self, memo: dict[int, Any]) -> Attachment:
        return Attachment(None)

    def __reduce__(self) -> tuple[type[Attachment], tuple[None]]:
        return Attachment, (None,)


class Gradients:
    """The gradients of a model's parameters, averaged over the ranks of `world` whenever a backward pass ends."""

    def __init__(
        self, model: torch.nn.Module, world: World, algorithm: str, bucket_bytes: int, wire: str | None = None
    ) -> None:
        if gradients_of(model) is not None:
            raise UsageError("the model is parallel already: call unisono.parallel once")
        self._world, self._algorithm, self._wire = world, algorithm, wire
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
        self._averaged = 1.0  # samples of the last average: what a second backward pass over the same forward pass has
        self._pending = False  # whether the exchange will be made when the present backward pass ends
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view
            parameter.register_post_accumulate_grad_hook(self._hook(view))  # type: ignore[no-untyped-call]
        attachment = Attachment(self)
        model.register_forward_pre_hook(attachment, with_kwargs=True)
        setattr(model, ATTACHED, attachment)

    def zero(self) -> None:
        """Set all gradients to zero, keeping them where they are (an optimizer's `zero_grad` may drop them)."""
        for flat in self.flats:
            flat.zero_()
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view

    def count(self, first: torch.Tensor | None) -> None:
        """A forward pass begins: its samples are the length of the first dimension of the first tensor it is given."""
        if self._pending:  # the last backward pass failed half way, and the program went on
            self._pending, self.samples = False, 0.0
        self.samples += first.shape[0] if first is not None and first.dim() else 1

    def exchange(self) -> None:
        """Average the gradients over all ranks, each rank's weighted by its samples; one with none gives nothing.

        The backward pass does this when it ends. A rank that has no backward pass in a step calls it instead.
        """
        start = time.perf_counter()
        self._gather_dropped()
        total = torch.tensor([self.samples], dtype=torch.float64)
        self._world.allreduce(total)
        together = time.perf_counter()
        for flat in self.flats:
            if self.samples:
                flat.mul_(self.samples / float(total))
            else:
                flat.zero_()
            self._world.allreduce(flat, self._algorithm, self._wire)
        self._averaged = self.samples or self._averaged
        self.samples = 0.0
        self.waiting += together - start
        self.communicating += time.perf_counter() - together

    def _gather_dropped(self) -> None:
        """Gradients that the optimizer dropped, and that no backward pass has made since, are zero."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is None:
                view.zero_()
                parameter.grad = view

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
        self.samples = self.samples or self._averaged
        self.exchange()


def gradients_of(model: torch.nn.Module) -> Gradients | None:
    """The Gradients of a model that was made parallel; None for another."""
    attachment: Attachment | None = getattr(model, ATTACHED, None)
    return None if attachment is None else attachment.gradients


def _first_tensor(values: Iterable[Any]) -> torch.Tensor | None:
    """The first tensor in what a model is given, in dicts, lists and tuples too."""
    for value in values:
        if isinstance(value, torch.Tensor):
            return value
        inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
        if (found := _first_tensor(inside)) is not None:
            return found
    return None
