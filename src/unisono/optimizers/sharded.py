"""Steps of an optimizer on one rank's segments of the parameters: its state is that of the segments alone.

    optimizer   group 0: w0 w1 w2   group 1: w3         options (rate, decay) by parameter, as they were given
    rank 1      group 0: w1[300:] w2[:50]               flat tensors in place of the parameters, with the same options

An elementwise optimizer (SGD, Adam, AdamW, ...) makes the same step on parts as on the whole, bit for bit. LARS and
LAMB also need norms of whole layers: `measure` gives this rank's part of their squares, `set_norms` takes their sums.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from traceback import walk_stack
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from unisono.errors import UsageError
from unisono.optimizers.layerwise import LayerwiseOptimizer
from unisono.optimizers.segments import Segment, State, copied

ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
)
"""Optimizers of PyTorch that update each element by itself."""


IN_SHARDS = (
    "the optimizer has this rank's shards of its state alone, and the world they were cut for was freed, or the model "
    "has another optimizer: make a new one, and load the state_dict() that this one gave before; in a loop of your own "
    "unisono.parallel(model, world, rule, optimizer) takes it in place of this one"
)
"""Message about an optimizer that can no longer be used."""


class SegmentUpdate(NamedTuple):
    """Segment with its weights and its gradient, flat tensors of one length."""

    segment: Segment
    weights: torch.Tensor
    gradient: torch.Tensor


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError for an optimizer that cannot be stepped in shards."""
    kind = type(optimizer)
    if any(isinstance(key, Segment) for key in optimizer.state):
        raise UsageError(IN_SHARDS)
    if kind not in ELEMENTWISE and not isinstance(optimizer, LayerwiseOptimizer):
        raise UsageError(
            f"Sharded updates shards of parameters, and {kind.__name__} is not known to update each element by itself: "
            "use unisono.BSP()"
        )
    if has_hooks(optimizer):
        raise UsageError(hooks_refused(optimizer))
    if is_patched(optimizer):
        raise UsageError(f"the step of {kind.__name__} was replaced, so Sharded cannot make it: use unisono.BSP()")


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return True where hooks see the optimizer's step, its own or those of all optimizers."""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)


def is_inner_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return True in a hook of a step that the `step` of a subclass has called: PyTorch runs hooks for both."""
    file = torch.optim.Optimizer.profile_hook_step.__code__.co_filename
    frames = (frame for frame, _ in walk_stack(None) if frame.f_code.co_filename == file)
    return sum(frame.f_locals.get("self") is optimizer for frame in frames) > 1


def is_patched(optimizer: torch.optim.Optimizer) -> bool:
    """Return True where the program has replaced the optimizer's step."""
    return "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched")


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the groups with a copy of their options (learning rate): later changes have no effect."""
    return [{name: copied(value) for name, value in group.items()} for group in optimizer.param_groups]


def part_of(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return an optimizer of the same class and state with these groups, but for empty ones."""
    part = object.__new__(type(optimizer))
    part.__dict__ |= {name: value for name, value in vars(optimizer).items() if name != "step"}
    part.param_groups = [group for group in groups if group["params"]]
    return part


def hooks_refused(optimizer: torch.optim.Optimizer) -> str:
    """Return the message about an optimizer with hooks."""
    return (
        f"{type(optimizer).__name__} has hooks on its step, which would see no gradients: remove them, give each model "
        "its own optimizer, or use unisono.BSP()"
    )


class ShardedStep:
    """Step of an optimizer for one backward pass, with the options (learning rate) that it had when the step began.

    `optimizer.state` has the state of each segment, by Segment.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        self._optimizer, self._options = optimizer, options_of(optimizer)
        numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._group = {
            numbers[id(parameter)]: place
            for place, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
            if id(parameter) in numbers
        }
        self._layers = [parameter.ndim > 1 for parameter in parameters]
        self._directions: dict[Segment, torch.Tensor] = {}
        self._norms: torch.Tensor | None = None

    def measure(self, updates: Sequence[SegmentUpdate]) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        """Return the number of each of these segments' layers, its weights and its direction: whoever sums their
        squares has the layer's norms. Begins the step of a layerwise optimizer."""
        found, optimizer, states = [], self._optimizer, self._states
        assert isinstance(optimizer, LayerwiseOptimizer), "only its programs measure norms"
        for segment, weights, gradient in self._known(updates):
            state, layer = states.setdefault(segment, {}), self._layers[segment.number]
            options, there = self._options[self._group[segment.number]], gradient.to(weights.device)
            direction = self._directions[segment] = optimizer.direction(weights, there, state, options, layer)
            if layer:
                found.append((segment.number, weights, direction))
        return found

    def set_norms(self, squares: torch.Tensor) -> None:
        """Take the sums of all ranks' squares."""
        self._norms = squares.sqrt()

    def update(self, updates: Sequence[SegmentUpdate]) -> None:
        """Make the step for these segments: their weights change in place."""
        known = self._known(updates)
        if isinstance(self._optimizer, LayerwiseOptimizer):
            self._move(self._optimizer, known)
            return
        groups: list[dict[str, Any]] = [{**options, "params": []} for options in self._options]
        states = defaultdict[Any, State](dict)
        for segment, weights, gradient in known:
            weights.grad = gradient.to(weights.device)
            groups[self._group[segment.number]]["params"].append(weights)
            states[weights] = self._states.get(segment, {})
        part = part_of(self._optimizer, groups)
        part._optimizer_step_pre_hooks = OrderedDict()  # those of the optimizer are for its own step
        part._optimizer_step_post_hooks = OrderedDict()
        part.state = states
        part.step()
        for segment, weights, _ in known:
            weights.grad = None
            if states[weights]:
                self._states[segment] = states[weights]

    def _move(self, optimizer: LayerwiseOptimizer, updates: Sequence[SegmentUpdate]) -> None:
        assert self._norms is not None, "the program sums norms before it updates"
        for segment, weights, _ in updates:
            layer, group = self._layers[segment.number], self._options[self._group[segment.number]]
            of_weights, of_direction = self._norms[segment.number].tolist()
            rate = optimizer.rate((of_weights, of_direction) if layer else None, group)
            optimizer.move(weights, self._directions.pop(segment), self._states[segment], group, rate, layer)

    def _known(self, updates: Sequence[SegmentUpdate]) -> list[SegmentUpdate]:
        """Return the updates of parameters that the optimizer has."""
        return [update for update in updates if update.segment.number in self._group]

    @property
    def _states(self) -> dict[Any, State]:
        return self._optimizer.state
