"""The optimizer's step in parts, each as soon as its gradients are there.

    optimizer        group 0: w0 w1 w2    group 1: w3            one step, of all
    part of bucket   group 0:    w1       group 1: w3            the same class, options and state, of fewer parameters

PyTorch's optimizers and those in `optimizers/` treat each parameter by itself, so that a step of the parts is the step
of the whole, bit for bit. Where gradients are clipped by their common norm there is one part, of all. Any other
optimizer, or one that has hooks, makes its own step when all gradients are there, and is waited for. LBFGS, which
computes several times in a step, cannot be driven so.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from unisono.errors import UsageError
from unisono.gradients import Gradients
from unisono.weak import weakly

Groups = list[dict[str, Any]]

BY_PARAMETER = ("torch.optim.", "unisono.optimizers.")
"""Where optimizers come from that treat each parameter by itself."""


class Updates:
    """Has `optimizer` applied to gradients as they come."""

    def __init__(self, optimizer: torch.optim.Optimizer, gradients: Gradients, clip: float | None) -> None:
        """`clip` is the norm that all gradients together have at most. Raises UsageError for LBFGS."""
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError(
                "LBFGS computes the loss several times in a step; use unisono.parallel and its step(closure)"
            )
        self._optimizer, self._gradients, self._clip = optimizer, gradients, clip
        self._known = {id(parameter) for parameter in gradients.parameters}
        self._groups: Groups = []
        self._apart = True
        for name in ("zero_grad", "state_dict", "load_state_dict", "add_param_group"):
            setattr(optimizer, name, _Waiting(optimizer, name, gradients))

    def begin(self) -> bool:
        """A step begins: its options (learning rate) are those of now, whatever is set before its last part is made.

        Whether the step is made in parts, which nobody has to wait for. Raises UsageError for a parameter that would be
        updated, but whose gradients never meet.
        """
        self._gradients.follow = weakly(self._follow)
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # what schedulers look for
        self._apart = self._may_be_parted()
        self._groups = [
            {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in group.items()}
            for group in self._optimizer.param_groups
        ]
        for group in self._groups:
            for parameter in group["params"]:
                if parameter.requires_grad and id(parameter) not in self._known:
                    raise UsageError(
                        f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the model's, or "
                        "was frozen when the model was made parallel: its gradients would differ from rank to rank"
                    )
        return self._apart

    def _follow(self, key: int, numbers: Sequence[int]) -> None:
        gradients = self._gradients
        everyone = range(len(gradients.parameters))
        last = key == len(gradients.buckets)
        if not self._apart and last:
            gradients.push_update(key, everyone, self._optimizer.step)
        elif self._apart and self._clip is not None and last:
            gradients.push_update(key, everyone, self._clipped(self._part(everyone)))
        elif self._apart and self._clip is None and numbers:
            gradients.push_update(key, numbers, self._part(numbers))

    def _may_be_parted(self) -> bool:
        optimizer = self._optimizer
        everybodys = _global_optimizer_pre_hooks or _global_optimizer_post_hooks
        hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks or everybodys
        changed = "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched")
        return type(optimizer).__module__.startswith(BY_PARAMETER) and not changed and not hooks

    def _part(self, numbers: Sequence[int]) -> Callable[[], object]:
        """The step of some parameters: another optimizer with the same state."""
        mine = {id(self._gradients.parameters[number]) for number in numbers}
        groups = [{**group, "params": [one for one in group["params"] if id(one) in mine]} for group in self._groups]
        part = object.__new__(type(self._optimizer))
        part.__dict__ |= {name: value for name, value in vars(self._optimizer).items() if name != "step"}
        part.param_groups = [group for group in groups if group["params"]]
        return part.step

    def _clipped(self, step: Callable[[], object]) -> Callable[[], object]:
        def update() -> None:
            assert self._clip is not None, "asked for"
            parameters = [one for one in self._gradients.parameters if one.grad is not None]
            torch.nn.utils.clip_grad_norm_(parameters, self._clip)
            step()

        return update


class _Waiting:
    """A method of an optimizer that waits first until all updates are over: it needs gradients and state as they are.

    It keeps neither alive: the optimizer keeps it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, name: str, gradients: Gradients) -> None:
        self._optimizer, self._gradients = weakref.ref(optimizer), weakref.ref(gradients)
        self._function, patched = getattr(type(optimizer), name), vars(optimizer).get(name)
        self._patched: Callable[..., Any] | None = patched._patched if isinstance(patched, _Waiting) else patched

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if (gradients := self._gradients()) is not None:
            gradients.wait()
        if self._patched is not None:
            return self._patched(*arguments, **named)
        return self._function(self._optimizer(), *arguments, **named)
