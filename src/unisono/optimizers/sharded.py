"""Steps of an optimizer on one rank's segments of the parameters: its state is that of the segments alone.

    optimizer   group 0: w0 w1 w2   group 1: w3         options (rate, decay) by parameter, as they were given
    rank 1      group 0: w1[300:] w2[:50]               flat tensors in place of the parameters, with the same options

An elementwise optimizer (SGD, Adam, AdamW, ...) makes the same step on parts as on the whole, bit for bit. LARS and
LAMB also need norms of whole layers: `measure` gives this rank's part of their squares, `set_norms` takes their sums.

Segments are the parts of a bucket that lie in one rank's shard:

    bucket        │ w3 ............ │ w2 .......................... │ w1 ....... │        12 elements, 4 ranks
    shard of rank  0 0 0 │ 1 1 1 │ 2 2 2 │ 3 3 3
    segments      rank 0: (3, 0, 3)   rank 1: (3, 3, 4), (2, 0, 2)   rank 2: (2, 2, 5)   rank 3: (1, 0, 3)

A segment is (number of the parameter, its first element there, one past the last), in the order of the parameter's
memory; a complex element counts as two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from traceback import walk_stack
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from unisono.errors import UsageError
from unisono.optimizers.layerwise import LayerwiseOptimizer, State
from unisono.schedules.pieces import bounds

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

SCALARS = ("step", "mu_product", "eta", "mu")
"""Names of state of PyTorch's optimizers that is one number for a whole parameter."""


class Segment(NamedTuple):
    """Part of a parameter."""

    parameter: int
    """Number of the parameter."""
    first: int
    last: int
    """One past its last element."""


class PlacedSegment(NamedTuple):
    """Segment, and the element of its bucket with which it begins."""

    segment: Segment
    start: int


class SegmentUpdate(NamedTuple):
    """Segment with its weights and its gradient, flat tensors of one length."""

    segment: Segment
    weights: torch.Tensor
    gradient: torch.Tensor


def refuse(*_: object, **__: object) -> None:
    """Raise UsageError: in place of methods of an optimizer that is left with one rank's shards."""
    raise UsageError(IN_SHARDS)


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError for an optimizer that cannot be stepped in shards."""
    kind = type(optimizer)
    if vars(optimizer).get("state_dict") is refuse or any(isinstance(key, Segment) for key in optimizer.state):
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


class StepCheck(partial[None]):
    """Hook before the step of all optimizers that may refuse it, or have its norms summed: parts need neither."""


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return True where hooks see the optimizer's step, its own or those of all optimizers."""
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks or _global_optimizer_post_hooks
    return bool(hooks) or any(not isinstance(hook, StepCheck) for hook in _global_optimizer_pre_hooks.values())


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


def make_step(part: torch.optim.Optimizer) -> None:
    """Make the step of a part, without hooks.

    A thread of the engine makes it. PyTorch's own wrapper goes through the hooks of all optimizers, which it cannot do
    while another thread adds or removes one.
    """
    step = type(part).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(part)  # type: ignore[attr-defined]


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
        indices = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._group = {
            indices[id(parameter)]: place
            for place, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
            if id(parameter) in indices
        }
        self._layers = [parameter.ndim > 1 for parameter in parameters]
        self._directions: dict[Segment, torch.Tensor] = {}
        self._norms: torch.Tensor | None = None

    def measure(self, updates: Sequence[SegmentUpdate]) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        """Return the number of each of these segments' layers, its weights and its direction: whoever sums their
        squares has the layer's norms. Begins the step of a layerwise optimizer."""
        measured, optimizer, states = [], self._optimizer, self._states
        assert isinstance(optimizer, LayerwiseOptimizer), "only its programs measure norms"
        for segment, weights, gradient in self._known(updates):
            state, layer = states.setdefault(segment, {}), self._layers[segment.parameter]
            options, on_device = self._options[self._group[segment.parameter]], gradient.to(weights.device)
            direction = self._directions[segment] = optimizer.direction(weights, on_device, state, options, layer)
            if layer:
                measured.append((segment.parameter, weights, direction))
        return measured

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
            groups[self._group[segment.parameter]]["params"].append(weights)
            states[weights] = self._states.get(segment, {})
        part = part_of(self._optimizer, groups)
        part.state = states
        make_step(part)
        for segment, weights, _ in known:
            weights.grad = None
            if states[weights]:
                self._states[segment] = states[weights]

    def _move(self, optimizer: LayerwiseOptimizer, updates: Sequence[SegmentUpdate]) -> None:
        assert self._norms is not None, "the program sums norms before it updates"
        for segment, weights, _ in updates:
            layer, group = self._layers[segment.parameter], self._options[self._group[segment.parameter]]
            of_weights, of_direction = self._norms[segment.parameter].tolist()
            rate = optimizer.rate((of_weights, of_direction) if layer else None, group)
            optimizer.move(weights, self._directions.pop(segment), self._states[segment], group, rate, layer)

    def _known(self, updates: Sequence[SegmentUpdate]) -> list[SegmentUpdate]:
        """Return the updates of parameters that the optimizer has."""
        return [update for update in updates if update.segment.parameter in self._group]

    @property
    def _states(self) -> dict[Any, State]:
        return self._optimizer.state


def segments_of(
    pieces: Iterable[tuple[int, slice, slice]], length: int, ranks: int, rank: int
) -> tuple[PlacedSegment, ...]:
    """Return the segments in a rank's shard of a bucket of `length` elements.

    `pieces` has, for each parameter in it: its number, its elements in the bucket, and these in the parameter. One
    without elements has its segment on every rank.

    >>> segments_of([(3, slice(0, 4), slice(0, 4)), (2, slice(4, 9), slice(0, 5))], 12, 4, 1)
    (PlacedSegment(segment=Segment(parameter=3, first=3, last=4), start=3), \
PlacedSegment(segment=Segment(parameter=2, first=0, last=2), start=4))
    """
    low, high = bounds(length, ranks, rank)
    placed = []
    for parameter, here, part in pieces:
        empty, shift = here.start == here.stop, part.start - here.start
        start, stop = (here.start, here.stop) if empty else (max(here.start, low), min(here.stop, high))
        if empty or start < stop:
            placed.append(PlacedSegment(Segment(parameter, start + shift, stop + shift), start))
    return tuple(placed)


def cut(
    state: Mapping[str, Any], parameter: torch.Tensor, strides: tuple[int, ...], segments: Iterable[Segment]
) -> dict[Segment, State]:
    """Return the state of a whole parameter as that of some of its segments, which follow these strides, copied."""
    flat = {
        name: in_order(value.detach(), strides) if _is_whole(name, value, parameter) else None
        for name, value in state.items()
    }
    return {
        segment: {
            name: copied(state[name] if elements is None else elements[segment.first : segment.last])
            for name, elements in flat.items()
        }
        for segment in segments
    }


def join(
    parts: Sequence[tuple[Segment, Mapping[str, Any]]], parameter: torch.Tensor, strides: tuple[int, ...]
) -> State:
    """Return the state of a whole parameter from that of all its segments, which follow these strides; empty where
    these have none."""
    joined: State = {}
    for segment, state in parts:
        for name, value in state.items():
            if not isinstance(value, torch.Tensor) or not value.dim():
                joined.setdefault(name, copied(value))
                continue
            if name not in joined:
                dtype = value.dtype.to_complex() if parameter.is_complex() else value.dtype
                flat = torch.zeros(parameter.numel(), dtype=dtype, device=parameter.device)
                joined[name] = flat.as_strided(parameter.shape, strides)
            in_order(joined[name], strides)[segment.first : segment.last] = value
    return joined


def _is_whole(name: str, value: object, parameter: torch.Tensor) -> bool:
    """Return True for state with an element for each of the parameter's."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return False
    return bool(parameter.dim()) or name not in SCALARS


def in_order(value: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return the elements of a tensor, flat, in the order of memory with these strides; complex ones as pairs."""
    if value.stride() != strides:
        value = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)
    flat = value.as_strided((value.numel(),), (1,), value.storage_offset())
    return torch.view_as_real(flat.resolve_conj()).view(-1) if flat.is_complex() else flat


def dense_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the parameter's own strides where it is dense (channels last is), else those of a contiguous tensor."""
    return torch.empty_like(parameter, device="meta").stride()


def copied(value: Any) -> Any:
    """Return a copy of a tensor; any other value as it is."""
    return value.clone() if isinstance(value, torch.Tensor) else value
