"""User's optimizer as the reducer sees it: whose state may be in shards, and whose step the program may wait for.

    backward()           placeholders in .grad, where the gradients are in shards
    optimizer.step()     begin_step: .grad = None │ the step itself: nothing to update │ end_step: shards, gathered
    zero_grad()          .grad = None, as after any step: without it, the next step is refused

Each rank keeps the state of its shards alone. The optimizer's state_dict is that of an unsharded one:

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

from unisono.engine.communicator_pool import ModelCollectives
from unisono.errors import UsageError
from unisono.optimizers.segments import Segment, State, cut, join
from unisono.optimizers.sharded import IN_SHARDS, ShardedStep, check_optimizer, hooks_refused, needs_norms
from unisono.reducer.backward_pass import BackwardPass
from unisono.reducer.bucket_memory import BucketMemory
from unisono.reducer.family_passes import ShardedPass
from unisono.reducer.optimizer_step import begin_step
from unisono.reducer.pass_runner import PassRunner
from unisono.reducer.programs import Programs
from unisono.reducer.scattered_gradient import GradientUse, StepMessage, clear, scatter, use_of
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
        if len(self.optimizer._optimizer_step_pre_hooks) > len(self._handles[:1]):
            raise UsageError(hooks_refused(self.optimizer))
        begin_step(self.optimizer, set(map(id, self._parameters)))
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


class UserOptimizer:
    """Optimizer of one rank's model."""

    def __init__(self, programs: Programs, runner: PassRunner, names: Sequence[str]) -> None:
        """Begin without an optimizer. `names` are the parameters'."""
        self._programs, self._runner, self._names = programs, runner, names
        self._memory = programs.memory
        self.sharded: ShardedOptimizer | None = None
        """Optimizer whose state is in shards, where the rule is sharded and `shard` was called."""
        self._set_aside: dict[int, torch.Tensor] = {}  # .grad of parameters while the user's optimizer makes its step
        self._placeholders: list[torch.Tensor | None] = []  # of the last pass, by number of the parameter
        self._begun: tuple[ShardedStep, StepMessage] | None = None  # step of the user's optimizer while it is made

    def shard(self, optimizer: torch.optim.Optimizer, own_loop: bool) -> None:
        """Let the optimizer keep the state of this rank's shards alone. Called by all ranks together.

        With `own_loop` its step is made when the program calls it. Raises UsageError for an optimizer that cannot be
        stepped in shards.
        """
        if self.sharded is not None:
            if self.sharded.optimizer is optimizer:
                return
            self._runner.wait()
            self.sharded.release()
        self.sharded = ShardedOptimizer(optimizer, self._memory, self._programs.collectives, self._runner.wait)
        self._programs.layer_norms = self.sharded.needs_norms
        self.sharded.lay_out(self._segments())
        if own_loop:
            self.sharded.follow(weakly(self.begin_step), weakly(self.end_step))

    def follow_layout(self) -> None:
        """Lay the shards out as the buckets are now."""
        if self.sharded is not None:
            self.sharded.lay_out(self._segments())

    def begin_step(self, closure: Closure | None) -> Closure | None:
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

    def end_step(self) -> None:
        """Run the tasks that follow the step, and put the gradients back. Raises the error that the ranks agree on."""
        try:
            self.finish_step(stepped=True)
        finally:
            for number, gradient in self._set_aside.items():
                self._memory.parameters[number].grad = gradient
            self._set_aside.clear()

    def finish_step(self, stepped: bool = False) -> None:
        """Run the tasks that follow the step of the user's optimizer: it has been made (`stepped`), or left out.

        They average the weights, if the rule does so after this step, or update and gather shards. Raises
        MismatchError for a step in shards that only some ranks have made.
        """
        if not self._runner.awaits_step:
            return
        last = self._runner.last
        if stepped and isinstance(last, ShardedPass) and self._begun is not None:
            last.step_with(*self._begun)
        self._runner.end_step()
        self._runner.wait()
        if isinstance(last, ShardedPass) and last.step_result is not None:
            error = last.step_result.error(self._names)
            if error is not None:
                raise error

    def hide_gradients(self, begun: BackwardPass) -> None:
        """Mark gradients that are in shards, until the optimizer's step: programs cannot read them."""
        if isinstance(begun, ShardedPass) and not begun.discarded:
            self._placeholders = scatter(self._memory.parameters, self._names, begun.has_gradient)

    def release(self) -> None:
        """Leave the optimizer."""
        if self.sharded is not None:
            self.sharded.release()
            clear(self._memory.parameters)

    def give_back(self) -> None:
        """Leave the optimizer, if it is in shards, with its whole state. Called by all ranks together."""
        if self.sharded is not None:
            self.finish_step()
            self.sharded.give_back()
            self.sharded = None
            clear(self._memory.parameters)

    def _set_gradients_aside(self) -> None:
        assert self.sharded is not None, "only its optimizer's step is followed"
        step, last, uses = self.sharded.begin(), self._runner.last, dict[int, GradientUse]()
        for number in self.sharded.numbers():
            parameter = self._memory.parameters[number]
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

    def _segments(self) -> Sequence[Segment]:
        """Return this rank's segments of all buckets."""
        rank, layout = self._programs.collectives.rank, self._programs.layout()
        groups = ((key, layout.group_of(key, rank)) for key in layout.keys)
        return [one.segment for key, group in groups for one in self._memory.segments(key, group, rank)]
