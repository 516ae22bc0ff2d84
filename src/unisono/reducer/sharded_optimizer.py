"""Optimizer of which each rank keeps the state of its shards alone. Its state_dict is that of an unsharded one.

    rank 0   {(w0, 0:300): m, v}  ┐
    rank 1   {(w0, 300:600): m, v, (w1, 0:50): m, v}  ┼─ state_dict() ─▶ {w0: m, v, w1: m, v}, on every rank
    rank 2   {(w1, 50:350): m, v} ┘

`state_dict` and a change of the buckets are collectives, one parameter after another: so a rank needs memory for one
whole parameter besides its result.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from unisono.errors import UsageError
from unisono.optimizers.segments import Segment, State, cut, join
from unisono.optimizers.sharded import IN_SHARDS, ShardedStep, check_optimizer, hooks_refused, needs_norms
from unisono.reducer.bucket_memory import BucketMemory
from unisono.reducer.model_collectives import ModelCollectives

Closure = Callable[[], Any]
"""Function that computes the loss and its gradients for a step."""

METHODS = {"state_dict": "state_dict", "load_state_dict": "load_state_dict", "__getstate__": "attributes"}
"""Methods of the optimizer that are replaced, with those of ShardedOptimizer that take their place."""


class ShardedOptimizer:
    """User's optimizer on one rank, whose `state` is by Segment."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        memory: BucketMemory,
        collectives: ModelCollectives,
        wait: Callable[[], None],
    ) -> None:
        """Take the optimizer over; `wait` waits for pending updates. Raises UsageError for one that cannot be stepped
        in shards, and for one that has been."""
        check_optimizer(optimizer)
        self.optimizer, self._memory, self._collectives, self._wait = optimizer, memory, collectives, wait
        self._parameters = memory.parameters
        self._segments: list[Segment] | None = None  # of this rank, also where it has none; None before the first
        self._handles: list[RemovableHandle] = []
        for name in METHODS:
            setattr(optimizer, name, _ShardedMethod(self, name))

    @property
    def needs_norms(self) -> bool:
        """True where a step needs norms of whole layers."""
        return needs_norms(self.optimizer)

    def numbers(self) -> list[int]:
        """Return the numbers of the model's parameters that the optimizer has."""
        held = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        return [number for number, parameter in enumerate(self._parameters) if id(parameter) in held]

    def follow(self, begin: Callable[[Closure | None], Closure | None], end: Callable[[], None]) -> None:
        """Call `begin` before and `end` after each step that a user's own loop makes. `begin` gets the step's closure,
        and returns the one that is called in its place."""

        def before(_: torch.optim.Optimizer, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
            closure = begin(named.get("closure", given[1] if len(given) > 1 else None))
            return given[:1], {**named, "closure": closure}

        self._handles = [
            self.optimizer.register_step_pre_hook(before),
            self.optimizer.register_step_post_hook(lambda *_: end()),
        ]

    def begin(self) -> ShardedStep:
        """Return the step that begins. Raises UsageError for a trainable parameter that is not the model's, and for a
        hook that was added after the model was made parallel."""
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # what schedulers look for
        if len(self.optimizer._optimizer_step_pre_hooks) > len(self._handles[:1]):
            raise UsageError(hooks_refused(self.optimizer))
        known = set(map(id, self._parameters))
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and id(parameter) not in known:
                    raise UsageError(
                        f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the model's, or "
                        "was frozen when the model was made parallel: its gradients would differ from rank to rank. "
                        "Put all that the optimizer trains into one torch.nn.ModuleDict, and make that parallel"
                    )
        return ShardedStep(self.optimizer, self._parameters)

    def lay_out(self, segments: Sequence[Segment]) -> None:
        """Adopt other segments of this rank. Called by all ranks together, while no update is pending."""
        before, self._segments = self._segments, list(segments)
        if before is not None:
            for number, whole in self._whole_states():
                for key in [key for key in self._state if isinstance(key, Segment) and key.number == number]:
                    del self._state[key]
                self._cut(number, whole)
        self._cut_all()

    def state_dict(self, root: int | None = None) -> dict[str, Any]:
        """Return the state as if unsharded; with `root`, only there, and no parameter's state elsewhere. Called by all
        ranks together."""
        optimizer, own, whole = self.optimizer, self.optimizer.state, self._whole(root)
        optimizer.state = whole
        try:
            return type(optimizer).state_dict(optimizer)
        finally:
            optimizer.state = own

    def attributes(self) -> dict[str, Any]:
        """Return the attributes of a copy, which is not sharded: `copy.deepcopy` and `pickle` use them. Called by all
        ranks together."""
        return {**type(self.optimizer).__getstate__(self.optimizer), "state": self._whole()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a whole state, and keep this rank's segments of it."""
        self._wait()
        type(self.optimizer).load_state_dict(self.optimizer, state)
        self._cut_all()

    def release(self) -> None:
        """Leave the optimizer, which holds a part of its state alone: using it raises UsageError from here on."""
        for handle in self._handles:
            handle.remove()
        self.optimizer.register_step_pre_hook(_refuse)
        for name in METHODS:
            setattr(self.optimizer, name, _refuse)

    def give_back(self) -> None:
        """Leave the optimizer as it was, with the whole state. Called by all ranks together."""
        self.optimizer.state = self._whole()
        for handle in self._handles:
            handle.remove()
        for name in METHODS:
            delattr(self.optimizer, name)

    @property
    def _state(self) -> dict[Any, State]:
        return self.optimizer.state

    def _cut_all(self) -> None:
        """Replace the states of whole parameters by those of this rank's segments."""
        for number, parameter in enumerate(self._parameters):
            if parameter in self._state:
                self._cut(number, self._state.pop(parameter))

    def _cut(self, number: int, whole: State) -> None:
        if whole:
            mine = [one for one in self._segments or () if one.number == number]
            self._state.update(cut(whole, self._parameters[number], mine))

    def _whole(self, root: int | None = None) -> defaultdict[Any, State]:
        """Return the states of whole parameters; with `root`, those that were in shards only there."""
        self._wait()
        whole: dict[Any, State] = {key: one for key, one in self._state.items() if isinstance(key, torch.Tensor)}
        for number, state in self._whole_states():
            if state and root in (None, self._collectives.rank):
                whole[self._parameters[number]] = state
        return defaultdict(dict, whole)

    def _whole_states(self) -> Iterator[tuple[int, State]]:
        """Yield each parameter's number and whole state; empty where it has none. That of a split one is of this rank's
        part."""
        mine: list[list[tuple[Segment, State]]] = [[] for _ in self._parameters]
        for key, state in self._state.items():
            if isinstance(key, Segment):
                mine[key.number].append((key, state))
        for number, parameter in enumerate(self._parameters):
            everyone = self._collectives.all_gather_object(mine[number])
            holders = self._memory.holders_of(number, self._collectives.rank, self._collectives.size)
            yield number, join([one for rank in holders for one in everyone[rank]], parameter)


def _refuse(*_: object, **__: object) -> None:
    raise UsageError(IN_SHARDS)


class _ShardedMethod:
    """Method of an optimizer that reads or writes the whole state.

    It keeps neither of the two alive, since the optimizer holds it.
    """

    def __init__(self, sharded: ShardedOptimizer, name: str) -> None:
        self._sharded, self._optimizer, self._name = weakref.ref(sharded), weakref.ref(sharded.optimizer), name

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if (sharded := self._sharded()) is not None:
            return getattr(sharded, METHODS[self._name])(*arguments, **named)
        optimizer = self._optimizer()
        return getattr(type(optimizer), self._name)(optimizer, *arguments, **named)
