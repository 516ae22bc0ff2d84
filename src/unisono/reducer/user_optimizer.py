"""User's optimizer as the reducer sees it: whose state may be in shards, and whose step the program may wait for.

backward()           placeholders in .grad, where the gradients are in shards
optimizer.step()     begin_step: .grad = None │ the step itself: nothing to update │ end_step: shards, gathered
zero_grad()          .grad = None, as after any step: without it, the next step is refused
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from unisono.errors import UsageError
from unisono.optimizers.segments import Segment
from unisono.optimizers.sharded import ShardedStep
from unisono.reducer.backward_pass import BackwardPass
from unisono.reducer.bucket_memory import BucketMemory
from unisono.reducer.model_collectives import ModelCollectives
from unisono.reducer.pass_runner import PassRunner
from unisono.reducer.programs import Programs
from unisono.reducer.scattered_gradient import clear, scatter
from unisono.reducer.sharded_optimizer import Closure, ShardedOptimizer
from unisono.reducer.sharded_pass import ShardedPass
from unisono.reducer.step_agreement import GradientUse, StepMessage, use_of
from unisono.weak import weakly


class UserOptimizer:
    """Optimizer of one rank's model."""

    def __init__(
        self,
        memory: BucketMemory,
        collectives: ModelCollectives,
        programs: Programs,
        runner: PassRunner,
        wait: Callable[[], None],
        names: Sequence[str],
    ) -> None:
        """Begin without an optimizer; `wait` waits for everything that is pending. `names` are the parameters'."""
        self._memory, self._collectives, self._programs, self._runner = memory, collectives, programs, runner
        self._wait, self._names = wait, names
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
            self._wait()
            self.sharded.release()
        self.sharded = ShardedOptimizer(optimizer, self._memory, self._collectives, self._wait)
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
        self._wait()
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
        rank, layout = self._collectives.rank, self._programs.layout()
        groups = ((key, layout.group_of(key, rank)) for key in layout.keys)
        return [one.segment for key, group in groups for one in self._memory.segments(key, group, rank)]
