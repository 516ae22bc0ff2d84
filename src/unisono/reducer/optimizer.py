"""User's optimizer, whose steps follow the exchanges: in parts, or in shards.

In parts, each runs as soon as its gradients are ready, from a `Trainer`:

    optimizer        group 0: w0 w1 w2    group 1: w3            one step, of all
    part of bucket   group 0:    w1       group 1: w3            the same class, options and state, of fewer parameters

PyTorch's optimizers and those in `optimizers/` update each parameter independently, so the parts together equal the
whole step, bit for bit. Any other optimizer, or one with hooks, makes its whole step when all gradients are ready, and
the main thread waits for it. LBFGS evaluates the loss several times in a step, which is not supported.

In shards, each rank keeps the state of its shards alone, and the step follows a sum in shards:

    backward()           placeholders in .grad, where the gradients are in shards
    optimizer.step()     .grad = None │ the step itself: nothing to update │ shards are updated, and gathered
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
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from unisono.engine import weakly
from unisono.errors import UsageError
from unisono.optimizers.layerwise import LayerwiseOptimizer, State, SumNorms
from unisono.optimizers.sharded import (
    Segment,
    ShardedStep,
    check_optimizer,
    cut,
    has_hooks,
    hooks_refused,
    is_patched,
    join,
    make_step,
    options_of,
    part_of,
    refuse,
)
from unisono.reducer.backward_pass import PassRunner
from unisono.reducer.programs import Programs
from unisono.reducer.replica import ModelReplica, ShardedReplica
from unisono.reducer.scattered_gradient import GradientUse, scatter, use_of
from unisono.reducer.structure import Structure
from unisono.step.layout import Updates

PER_PARAMETER_MODULES = ("torch.optim.", "unisono.optimizers.")
"""Module prefixes of the optimizers that update each parameter independently."""


class SplitStep:
    """Step of an optimizer, with the options (learning rate) it had when it began. Later changes have no effect."""

    def __init__(self, optimizer: torch.optim.Optimizer, structure: Structure) -> None:
        """Begin the step. Raises UsageError for a trainable parameter that is not the model's with this structure."""
        begin_step(optimizer, structure.known)
        self._optimizer, self._parameters = optimizer, structure.parameters
        per_parameter = type(optimizer).__module__.startswith(PER_PARAMETER_MODULES)
        splits = per_parameter and not is_patched(optimizer) and not has_hooks(optimizer)
        self.updates = Updates.PARTS if splits else Updates.WHOLE
        """PARTS where the step is made in parts, which need not be waited for; else WHOLE."""
        self._groups = options_of(optimizer)
        self._places = {id(each): place for place, group in enumerate(self._groups) for each in group["params"]}

    def update(self, parameters: Sequence[int], sum_norms: SumNorms | None = None) -> None:
        """Make the step for these parameters, given by index; for all parameters where it is not made in parts. The
        norms of layers are completed by `sum_norms`."""
        optimizer, whole = self._optimizer, self.updates is Updates.WHOLE
        if not whole:
            groups: list[dict[str, Any]] = [{**group, "params": []} for group in self._groups]
            for parameter in (self._parameters[index] for index in parameters):
                if (place := self._places.get(id(parameter))) is not None:
                    groups[place]["params"].append(parameter)
            optimizer = part_of(optimizer, groups)
        if sum_norms is not None:
            optimizer.sums = {self: sum_norms}  # type: ignore[attr-defined]  # a LayerwiseOptimizer
        optimizer.step() if whole else make_step(optimizer)


def wait_on_use(optimizer: torch.optim.Optimizer, wait: Callable[[], object]) -> None:
    """Make the optimizer's methods call `wait`, which waits for pending updates. Raises UsageError for LBFGS."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError("LBFGS computes the loss several times in a step; use unisono.parallel and its step(closure)")
    for name in ("zero_grad", "state_dict", "load_state_dict", "add_param_group"):
        of_class = partial(_of_class, weakref.ref(optimizer), name)
        before = vars(optimizer).get(name, of_class)
        if isinstance(before, partial) and before.func is _wait_and_call:  # by an earlier Trainer
            before = before.args[1]
        if isinstance(before, partial) and before.func is _of_class:  # perhaps that of an optimizer this is a copy of
            before = of_class
        setattr(optimizer, name, partial(_wait_and_call, wait, before))


def begin_step(optimizer: torch.optim.Optimizer, known: Collection[int]) -> None:
    """Mark the optimizer's step as made. Raises UsageError for a trainable parameter whose id is not among the `known`
    ones of the model."""
    optimizer._opt_called = True  # type: ignore[attr-defined]  # what schedulers look for
    check_known(optimizer, known)


def check_known(optimizer: torch.optim.Optimizer, known: Collection[int]) -> None:
    """Raise UsageError for a trainable parameter of the optimizer whose id is not among the `known` ones."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and id(parameter) not in known:
                raise UsageError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the model's, or was "
                    "frozen when the model was made parallel: its gradients would differ from rank to rank. Put all "
                    "that the optimizer trains into one torch.nn.ModuleDict, and make that parallel"
                )


def _wait_and_call(wait: Callable[[], object], method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call a method of an optimizer once all updates are finished: it needs final gradients and state."""
    wait()
    return method(*arguments, **named)


def _of_class(optimizer: weakref.ref[torch.optim.Optimizer], name: str, *arguments: Any, **named: Any) -> Any:
    """Call a method as the optimizer's class has it. The optimizer, which holds the call, is not kept alive."""
    return getattr(type(optimizer()), name)(optimizer(), *arguments, **named)


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
        self._memory, self._collectives = programs.memory, programs.collectives
        self._parameters = self._memory.parameters
        self._segments: list[Segment] | None = None  # of this rank, also where it has none; None before the first
        self._handles: list[RemovableHandle] = []
        self._set_aside: dict[int, torch.Tensor] = {}  # .grad of parameters while the user's optimizer makes its step
        self._placeholders: list[torch.Tensor | None] = [None] * len(self._parameters)  # of the last pass
        for name, method in METHODS.items():
            setattr(optimizer, name, weakly(getattr(self, method), refuse))  # without the model
        programs.layer_norms = isinstance(optimizer, LayerwiseOptimizer)
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
        self._segments = [placed.segment for key, group in groups for placed in memory.segments(key, group, rank)]
        if before is not None:
            for index, state in self._joined_states():
                for key in [key for key in self._state if isinstance(key, Segment) and key.parameter == index]:
                    del self._state[key]
                self._cut(index, state)
        self._cut_all()

    def hide_gradients(self, summed: ModelReplica) -> None:
        """Mark gradients that are in shards, until the optimizer's step: programs cannot read them."""
        if isinstance(summed, ShardedReplica) and not summed.discarded:
            self._placeholders = scatter(self._parameters, self._names, summed.has_gradient)

    def state_dict(self, root: int | None = None) -> dict[str, Any]:
        """Return the state as if unsharded; with `root`, only there, and no parameter's state elsewhere. Called by all
        ranks together."""
        optimizer, shards, full = self.optimizer, self.optimizer.state, self._full_state(root)
        optimizer.state = full
        try:
            return type(optimizer).state_dict(optimizer)
        finally:
            optimizer.state = shards

    def attributes(self) -> dict[str, Any]:
        """Return the attributes of a copy, which is not sharded: `copy.deepcopy` and `pickle` use them. Called by all
        ranks together."""
        return {**type(self.optimizer).__getstate__(self.optimizer), "state": self._full_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a whole state, and keep this rank's segments of it."""
        self._runner.wait()
        type(self.optimizer).load_state_dict(self.optimizer, state)
        self._cut_all()

    def release(self) -> None:
        """Leave the optimizer, which holds a part of its state alone: using it raises UsageError from here on."""
        for handle in self._handles:
            handle.remove()
        self.optimizer.register_step_pre_hook(refuse)
        for name in METHODS:
            setattr(self.optimizer, name, refuse)

    def give_back(self) -> None:
        """Leave the optimizer as it was, with the whole state. Called by all ranks together."""
        self.optimizer.state = self._full_state()
        for handle in self._handles:
            handle.remove()
        for name in METHODS:
            delattr(self.optimizer, name)

    def _follow(self) -> None:
        """Begin and end a step in shards around each step that a user's own loop makes. Gradients are set aside before
        the optimizer reads them, after its closure if it has one: it has nothing to update by itself."""
        set_aside, end = weakly(self._set_gradients_aside), weakly(self._end_step)

        def before(_: torch.optim.Optimizer, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
            if (closure := named.get("closure", given[1] if len(given) > 1 else None)) is None:
                set_aside()
                return None
            return given[:1], {**named, "closure": lambda: (closure(), set_aside())[0]}

        self._handles = [
            self.optimizer.register_step_pre_hook(before),
            self.optimizer.register_step_post_hook(lambda *_: end()),
        ]

    def _end_step(self) -> None:
        """Run the tasks that follow the step, and put the gradients back. Raises the error that the ranks agree on."""
        try:
            self._runner.finish_step()
        finally:
            for index, gradient in self._set_aside.items():
                self._parameters[index].grad = gradient
            self._set_aside.clear()

    def _set_gradients_aside(self) -> None:
        """Give the step, and what the program has done to gradients, to the pass that waits for it. Raises UsageError
        for gradients without a backward pass that has summed them."""
        step, uses = self.begin(), dict[int, GradientUse]()
        last = self._runner.last.replica if self._runner.last is not None and self._runner.awaits_step else None
        held = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        for index, parameter in enumerate(self._parameters):
            if id(parameter) not in held:
                continue
            if parameter.grad is not None:
                if last is None:
                    raise UsageError(
                        f"parameter {self._names[index]} has a gradient that no backward pass since the last "
                        "optimizer.step() has summed: with Sharded, call step() once after each backward(), which is "
                        "not under no_sync, or after unisono.synchronize(model), where the program has set .grad"
                    )
                self._set_aside[index] = parameter.grad
            summed = isinstance(last, ShardedReplica) and last.has_gradient(index)
            if (use := use_of(parameter.grad, self._placeholders[index] if summed else None)) is not None:
                uses[index] = use
            parameter.grad = None
        if isinstance(last, ShardedReplica):
            last.shards.step, last.uses = step, uses

    @property
    def _state(self) -> dict[Any, State]:
        return self.optimizer.state

    def _cut_all(self) -> None:
        """Replace the states of whole parameters by those of this rank's segments."""
        for index, parameter in enumerate(self._parameters):
            if parameter in self._state:
                self._cut(index, self._state.pop(parameter))

    def _cut(self, index: int, state: State) -> None:
        if state:
            segments = [segment for segment in self._segments or () if segment.parameter == index]
            self._state.update(cut(state, self._parameters[index], self._memory.strides[index], segments))

    def _full_state(self, root: int | None = None) -> defaultdict[Any, State]:
        """Return the states of whole parameters; with `root`, those that were in shards only there."""
        self._runner.wait()
        full: dict[Any, State] = {key: state for key, state in self._state.items() if torch.is_tensor(key)}
        for index, state in self._joined_states():
            if state and root in (None, self._collectives.rank):
                full[self._parameters[index]] = state
        return defaultdict(dict, full)

    def _joined_states(self) -> Iterator[tuple[int, State]]:
        """Yield each parameter's index and whole state; empty where it has none. That of a split one is of this rank's
        part."""
        shards: list[list[tuple[Segment, State]]] = [[] for _ in self._parameters]
        moved: list[set[str]] = [set() for _ in self._parameters]  # names of state on the parameter's device
        for key, state in self._state.items():
            if isinstance(key, Segment):
                on_host = {name: value.cpu() if torch.is_tensor(value) else value for name, value in state.items()}
                shards[key.parameter].append((key, on_host))
                device = self._parameters[key.parameter].device
                moved[key.parameter] |= {
                    name for name, value in state.items() if torch.is_tensor(value) and value.device == device
                }
        for index, parameter in enumerate(self._parameters):
            gathered, names = zip(*self._collectives.all_gather_object((shards[index], moved[index])), strict=True)
            holders = self._memory.parts.holders_of(index, self._collectives.rank, self._collectives.size)
            parts = [part for rank in holders for part in gathered[rank]]
            joined, on_device = join(parts, parameter, self._memory.strides[index]), set().union(*names)
            yield index, {k: v.to(parameter.device) if k in on_device else v for k, v in joined.items()}
