"""User's optimizer as the reducer sees it: whose state may be in shards, and whose step the program may wait for.

backward()           placeholders in .grad, where the gradients are in shards
optimizer.step()     begin_step: .grad = None │ the step itself: nothing to update │ finish_step: shards, gathered
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from unisono.optimizers.segments import Segment
from unisono.reducer.backward_pass import BackwardPass
from unisono.reducer.bucket_memory import BucketMemory
from unisono.reducer.model_collectives import ModelCollectives
from unisono.reducer.pass_runner import PassRunner
from unisono.reducer.programs import Programs
from unisono.reducer.scattered_gradient import clear, scatter
from unisono.reducer.sharded_optimizer import ShardedOptimizer
from unisono.reducer.sharded_pass import ShardedPass
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
    ) -> None:
        """Begin without an optimizer; `wait` waits for everything that is pending."""
        self._memory, self._collectives, self._programs, self._runner = memory, collectives, programs, runner
        self._wait = wait
        self.offered: torch.optim.Optimizer | None = None
        """Optimizer that may be sharded, for a rule that chooses."""
        self.sharded: ShardedOptimizer | None = None
        """Optimizer whose state is in shards, where the rule is sharded and `shard` was called."""
        self._stepping = False

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
        self.sharded = ShardedOptimizer(optimizer, self._memory.parameters, self._collectives, self._wait)
        self._programs.layer_norms = self.sharded.needs_norms
        self.sharded.lay_out(self._segments())
        if own_loop:
            self.sharded.follow(weakly(self.begin_step), weakly(self._end_step))

    def follow_layout(self, sharded: bool) -> None:
        """Lay the shards out as the buckets are now. A `sharded` rule takes an offered optimizer over."""
        if self.sharded is not None:
            self.sharded.lay_out(self._segments())
        elif sharded and self.offered is not None:
            self.shard(self.offered, own_loop=False)

    def begin_step(self) -> None:
        """Clear the gradients before the user's optimizer is called: it has nothing to update by itself."""
        self._stepping = True
        clear(self._memory.parameters)

    def finish_step(self, stepped: bool = False) -> None:
        """Run the tasks that follow the step of the user's optimizer: it has been made (`stepped`), or left out.

        They average the weights, if the rule does so after this step, or update and gather shards.
        """
        if not self._runner.awaits_step:
            return
        last = self._runner.last
        if stepped and isinstance(last, ShardedPass) and self.sharded is not None:
            last.step_with(self.sharded.begin())
        self._runner.end_step()
        self._wait()

    def hide_gradients(self, begun: BackwardPass) -> None:
        """Mark gradients that are in shards, until the optimizer's step: programs cannot read them."""
        if isinstance(begun, ShardedPass) and not self._stepping and not begun.discarded:
            scatter(self._memory.parameters, begun.has_gradient)

    def release(self) -> None:
        """Leave the optimizer."""
        if self.sharded is not None:
            self.sharded.release()

    def _end_step(self) -> None:
        self._stepping = False
        self.finish_step(stepped=True)

    def _segments(self) -> Sequence[Segment]:
        """Return this rank's segments of all buckets."""
        rank, ranks = self._collectives.rank, self._collectives.size
        keys = self._programs.layout().keys
        return [one.segment for key in keys for one in self._memory.segments(key, ranks, rank)]
