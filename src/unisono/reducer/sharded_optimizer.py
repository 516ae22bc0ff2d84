"""User's optimizer in shards: each rank keeps the state of its shards alone, and its step follows a sum in shards.

    backward()           placeholders in .grad, where the gradients are in shards
    optimizer.step()     begin_step: .grad = None │ the step itself: nothing to update │ end_step: shards, gathered
    zero_grad()          .grad = None, as after any step: without it, the next step is refused

The optimizer's state_dict is that of an unsharded one:

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
from unisono.reducer.backward_pass import BackwardPass
from unisono.reducer.family_passes import ShardedPass
from unisono.reducer.optimizer_step import begin_step
from unisono.reducer.pass_runner import PassRunner
from unisono.reducer.programs import Programs
from unisono.reducer.scattered_gradient import GradientUse, StepMessage, scatter, use_of
from unisono.weak import weakly

Closure = Callable[[], Any]
"""Function that computes the loss and its gradients for a step."""

METHODS = {"state_dict": "state_dict", "load_state_dict": "load_state_dict", "__getstate__": "attributes"}
"""Methods of the optimizer that are replaced, with those of ShardedOptimizer that take their place."""


class ShardedOptimizer:
    """User's optimizer on one rank, whose `state` is by Segment."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        programs: Programs,
        runner: PassRunner,
        names: Sequence[str],
        own_loop: bool,
    ) -> None:
        """Take the optimizer over, on all ranks together; `names` are the parameters'. With `own_loop` its step is made
        when the program calls it. Raises UsageError for one that cannot be stepped in shards, and for one that has
        been."""
        check_optimizer(optimizer)
        self.optimizer, self._programs, self._runner, self._names = optimizer, programs, runner, names
        self._memory, self._collectives, self._parameters = programs.memory, programs.collectives, runner.parameters
        self._segments: list[Segment] | None = None  # of this rank, also where it has none; None before the first
        self._handles: list[RemovableHandle] = []
        self._set_aside: dict[int, torch.Tensor] = {}  # .grad of parameters while the user's optimizer makes its step
        self._placeholders: list[torch.Tensor | None] = [None] * len(
            self._parameters
        )  # of the last pass, by number of the parameter
        self._begun: tuple[ShardedStep, StepMessage] | None = None  # step of the user's optimizer while it is made
        for name in METHODS:
            setattr(optimizer, name, _ShardedMethod(self, name))
        programs.layer_norms = needs_norms(optimizer)
        self.lay_out()
        if own_loop:
            self._follow()

    def begin(self) -> ShardedStep:
        """Return the step that begins. Raises UsageError for a trainable parameter that is not the model's, and for a
        hook that was added after the model was made parallel."""
        if len(self.optimizer._optimizer_step_pre_hooks) > len(self._handles[:1]):
            raise UsageError(hooks_refused(self.optimizer))
        begin_step(self.optimizer, set(map(id, self._parameters)))
        return ShardedStep(self.optimizer, self._parameters)

    def lay_out(self) -> None:
        """Lay the shards out as the buckets are now. Called by all ranks together, while no update is pending."""
        rank, layout, memory = self._collectives.rank, self._programs.layout(), self._memory
        groups = ((key, layout.group_of(key, rank)) for key in layout.keys)
        before = self._segments
        self._segments = [one.segment for key, group in groups for one in memory.segments(key, group, rank)]
        if before is not None:
            for number, whole in self._whole_states():
                for key in [key for key in self._state if isinstance(key, Segment) and key.number == number]:
                    del self._state[key]
                self._cut(number, whole)
        self._cut_all()

    def hide_gradients(self, begun: BackwardPass) -> None:
        """Mark gradients that are in shards, until the optimizer's step: programs cannot read them."""
        if isinstance(begun, ShardedPass) and not begun.discarded:
            self._placeholders = scatter(self._parameters, self._names, begun.has_gradient)

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
        self._runner.wait()
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

    def _follow(self) -> None:
        """Begin and end a step in shards around each step that a user's own loop makes. The step gets the closure that
        `_begin_step` returns in place of its own."""
        begin, end = weakly(self._begin_step), weakly(self._end_step)

        def before(_: torch.optim.Optimizer, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
            closure = begin(named.get("closure", given[1] if len(given) > 1 else None))
            return given[:1], {**named, "closure": closure}

        self._handles = [
            self.optimizer.register_step_pre_hook(before),
            self.optimizer.register_step_post_hook(lambda *_: end()),
        ]

    def _begin_step(self, closure: Closure | None) -> Closure | None:
        """Set all gradients aside before the user's optimizer reads them: it has nothing to update by itself. Return
        the closure to be called, which does so at its end, if there is one. Raises UsageError for gradients without a
        backward pass that has summed them."""
        if closure is None:
            self._set_gradients_aside()
            return None

        def closing() -> Any:
            loss = closure()
            self._set_gradients_aside()
            return loss

        return closing

    def _end_step(self) -> None:
        """Run the tasks that follow the step, and put the gradients back. Raises the error that the ranks agree on."""
        try:
            last = self._runner.last
            if self._runner.awaits_step and isinstance(last, ShardedPass) and self._begun is not None:
                last.step_with(*self._begun)
            self._runner.finish_step()
        finally:
            for number, gradient in self._set_aside.items():
                self._parameters[number].grad = gradient
            self._set_aside.clear()

    def _set_gradients_aside(self) -> None:
        step, last, uses = self.begin(), self._runner.last, dict[int, GradientUse]()
        held = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        for number, parameter in enumerate(self._parameters):
            if id(parameter) not in held:
                continue
            if parameter.grad is not None:
                if not self._runner.awaits_step:
                    raise UsageError(
                        f"parameter {self._names[number]} has a gradient that no backward pass since the last "
                        "optimizer.step() has summed: with Sharded, call step() once after each backward(), which is "
                        "not under no_sync, or after unisono.synchronize(model), where the program has set .grad"
                    )
                self._set_aside[number] = parameter.grad
            summed = isinstance(last, ShardedPass) and self._runner.awaits_step and last.has_gradient(number)
            given = self._placeholders[number] if summed else None
            if (use := use_of(parameter.grad, given)) is not None:
                uses[number] = use
            parameter.grad = None
        self._begun = step, StepMessage(True, uses)

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
        self._runner.wait()
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
            holders = self._memory.parts.holders_of(number, self._collectives.rank, self._collectives.size)
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
