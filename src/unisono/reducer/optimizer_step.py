"""Optimizer steps in parts. Each part runs as soon as its gradients are ready.

    optimizer        group 0: w0 w1 w2    group 1: w3            one step, of all
    part of bucket   group 0:    w1       group 1: w3            the same class, options and state, of fewer parameters

PyTorch's optimizers and those in `optimizers/` update each parameter independently, so the parts together equal the
whole step, bit for bit. Any other optimizer, or one with hooks, makes its whole step when all gradients are ready, and
the main thread waits for it. LBFGS evaluates the loss several times in a step, which is not supported.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from unisono.errors import UsageError
from unisono.optimizers.sharded import has_hooks, is_patched, options_of, part_of
from unisono.step.layout import Updates

PER_PARAMETER_MODULES = ("torch.optim.", "unisono.optimizers.")
"""Module prefixes of the optimizers that update each parameter independently."""


class SplitStep:
    """Step of an optimizer, with the options (learning rate) it had when it began. Later changes have no effect."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._optimizer, self._parameters = optimizer, parameters
        self.updates = Updates.PARTS if _can_be_split(optimizer) else Updates.WHOLE
        """PARTS where the step is made in parts, which need not be waited for; else WHOLE."""
        self._groups = options_of(optimizer)

    def update(self, parameters: Sequence[int]) -> None:
        """Make the step for these parameters, given by number; for all parameters where it is not made in parts."""
        if self.updates is Updates.WHOLE:
            self._optimizer.step()
            return
        mine = {id(self._parameters[number]) for number in parameters}
        groups = [{**group, "params": [one for one in group["params"] if id(one) in mine]} for group in self._groups]
        part_of(self._optimizer, groups).step()


class BucketedOptimizer:
    """Application of `optimizer` to the gradients of a model's parameters, part by part."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.nn.Parameter],
        wait: Callable[[], object],
    ) -> None:
        """Make the optimizer's methods call `wait`, which waits for pending updates. Raises UsageError for LBFGS."""
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError(
                "LBFGS computes the loss several times in a step; use unisono.parallel and its step(closure)"
            )
        self._optimizer, self._parameters = optimizer, parameters
        self._known = {id(parameter) for parameter in parameters}
        for name in ("zero_grad", "state_dict", "load_state_dict", "add_param_group"):
            setattr(optimizer, name, _WaitingMethod(optimizer, name, wait))

    def begin(self) -> SplitStep:
        """Return the step that begins.

        Raises UsageError for a trainable parameter of the optimizer whose gradients are not averaged.
        """
        begin_step(self._optimizer, self._known)
        return SplitStep(self._optimizer, self._parameters)


def begin_step(optimizer: torch.optim.Optimizer, known: Collection[int]) -> None:
    """Mark the optimizer's step as made. Raises UsageError for a trainable parameter whose id is not among the `known`
    ones of the model."""
    optimizer._opt_called = True  # type: ignore[attr-defined]  # what schedulers look for
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and id(parameter) not in known:
                raise UsageError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the model's, or was "
                    "frozen when the model was made parallel: its gradients would differ from rank to rank. Put all "
                    "that the optimizer trains into one torch.nn.ModuleDict, and make that parallel"
                )


def _can_be_split(optimizer: torch.optim.Optimizer) -> bool:
    per_parameter = type(optimizer).__module__.startswith(PER_PARAMETER_MODULES)
    return per_parameter and not is_patched(optimizer) and not has_hooks(optimizer)


class _WaitingMethod:
    """Method of an optimizer that first waits until all updates are finished: it needs final gradients and state.

    It does not keep the optimizer alive, which holds it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, name: str, wait: Callable[[], object]) -> None:
        self._optimizer, self._wait = weakref.ref(optimizer), wait
        self._function, patched = getattr(type(optimizer), name), vars(optimizer).get(name)
        self._patched: Callable[..., Any] | None = patched._patched if isinstance(patched, _WaitingMethod) else patched

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self._wait()
        if self._patched is not None:
            return self._patched(*arguments, **named)
        return self._function(self._optimizer(), *arguments, **named)
