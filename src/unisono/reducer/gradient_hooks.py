"""Hooks of parameters, which autograd calls when a gradient is complete. They keep nothing alive: Python's collector
does not see what holds hooks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

MarkReady = Callable[[int, bool], None]
"""Function of a parameter's number, and True where no hooks of the program's own follow: they may change its
gradient."""


class GradientHook:
    """Hook of the parameter with this number."""

    def __init__(self, number: int, mark_ready: weakref.ref[MarkReady]) -> None:
        self._number, self._mark_ready = number, mark_ready

    def __call__(self, parameter: torch.Tensor) -> None:
        if (mark_ready := self._mark_ready()) is not None:
            last = next(reversed(parameter._post_accumulate_grad_hooks.values()))
            mark_ready(self._number, last is self)


def accumulators_of(parameters: Sequence[torch.Tensor]) -> list[Node]:
    """Return the nodes that add to `.grad`. Their hooks run in `backward()` alone; those of a tensor run in
    `torch.autograd.grad`, too. Autograd forgets a node that nobody holds, with its hooks."""
    return [get_gradient_edge(parameter).node for parameter in parameters]


def register_hooks(parameters: Sequence[torch.Tensor], mark_ready: MarkReady) -> list[RemovableHandle]:
    """Call a bound method for each gradient that is complete, as long as its object lives. Return the handles."""
    reference = weakref.WeakMethod(mark_ready)
    return [
        parameter.register_post_accumulate_grad_hook(GradientHook(number, reference))  # type: ignore[no-untyped-call]
        for number, parameter in enumerate(parameters)
    ]
