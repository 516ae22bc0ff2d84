"""The optimizer's step in parts, each as soon as its gradients are there.

    optimizer        group 0: w0 w1 w2    group 1: w3            one step, of all
    part of bucket   group 0:    w1       group 1: w3            the same class, options and state, of fewer parameters

PyTorch's optimizers treat each parameter by itself, so that a step of the parts is the step of the whole, bit for bit.
Not so LBFGS, what is not PyTorch's own, or what has hooks: there, and where gradients are clipped by their common norm,
the whole step is made when all gradients are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from unisono.gradients import Gradients

Groups = list[dict[str, Any]]


class Updates:
    """Has `optimizer` applied to gradients as they come."""

    def __init__(self, optimizer: torch.optim.Optimizer, gradients: Gradients, clip: float | None) -> None:
        """`clip` is the norm that all gradients together have at most."""
        self._optimizer, self._gradients, self._clip = optimizer, gradients, clip
        known = {id(parameter) for parameter in gradients.parameters}
        listed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._elsewhere = any(id(parameter) not in known for parameter in listed)
        self._groups: Groups = []
        gradients.follow = self._follow

    def begin(self) -> None:
        """A step begins: its options (learning rate) are those of now, whatever is set before its last part is made."""
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # what schedulers look for
        self._groups = [
            {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in group.items()}
            for group in self._optimizer.param_groups
        ]

    def _follow(self, key: int, numbers: Sequence[int]) -> None:
        last = key == len(self._gradients.buckets)
        if not self._parts():
            if last:
                everyone = range(len(self._gradients.parameters))
                self._gradients.push_update(key, everyone, self._whole)
        elif numbers:
            mine = {id(self._gradients.parameters[number]) for number in numbers}
            groups = [
                {**group, "params": [one for one in group["params"] if id(one) in mine]} for group in self._groups
            ]
            self._gradients.push_update(key, numbers, self._part([group for group in groups if group["params"]]))

    def _parts(self) -> bool:
        """Whether the step may be made in parts."""
        optimizer = self._optimizer
        hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        own = type(optimizer).__module__.startswith("torch.optim.") and not isinstance(optimizer, torch.optim.LBFGS)
        return own and not hooks and self._clip is None and not self._elsewhere

    def _part(self, groups: Groups) -> Callable[[], None]:
        optimizer = self._optimizer
        part = object.__new__(type(optimizer))
        part.__dict__ |= {name: value for name, value in vars(optimizer).items() if name != "step"}  # a scheduler's own
        part.param_groups = groups
        return part.step

    def _whole(self) -> None:
        parameters = self._gradients.parameters
        if self._clip is not None:
            torch.nn.utils.clip_grad_norm_([one for one in parameters if one.grad is not None], self._clip)
        groups = self._optimizer.param_groups
        now = [dict(group) for group in groups]
        for group, options in zip(groups, self._groups, strict=True):
            group.update(options)
        self._optimizer.step()
        for group, options in zip(groups, now, strict=True):
            group.update(options)
