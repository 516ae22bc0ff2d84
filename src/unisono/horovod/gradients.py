"""Averages of an optimizer's gradients, made by the reducer that serves `unisono.parallel`.

    backward() 1 .. k-1     gradients add up on this rank
    backward() k            averaged while the pass runs           complete
    step()                  averages what is not complete, then the optimizer's own step: a new accumulation begins
    synchronize()           the same without the step; the next gradient begins a new accumulation
    zero_grad()             a new accumulation begins

A module that holds the optimizer's parameters stands for the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from unisono.data_parallel import parallel
from unisono.errors import UsageError
from unisono.reducer import Reducer, reducer_of
from unisono.rules import BSP, Exchange
from unisono.weak import weakly
from unisono.world import World


class GradientExchange:
    """Averages of the gradients of `optimizer`: every `passes` backward passes, or when they are asked for."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[int, str],
        wire: str | None,
        passes: int,
        world: World,
    ) -> None:
        """Make all ranks' parameters those of rank 0. `names` has the names of parameters by their `id`."""
        self.optimizer = optimizer
        self.module = _module_of(optimizer.param_groups, names)
        """Module that holds the parameters."""
        parameters = list(self.module.parameters())
        self.parameters = frozenset(map(id, parameters))
        """Identities of the optimizer's parameters."""
        self.closed = False
        self._counts = [0] * len(parameters)
        """Backward passes that have reached each parameter in this accumulation."""
        self._complete = False  # whether this accumulation was averaged on demand, and the next gradient begins another
        count = weakly(self._count)
        self._hooks = [  # before the reducer's: the first gradient of the last pass begins the average
            parameter.register_post_accumulate_grad_hook(partial(_call, count, number))  # type: ignore[no-untyped-call]
            for number, parameter in enumerate(parameters)
            if parameter.requires_grad
        ]
        parallel(self.module, world, BSP(exchange=Exchange(wire=wire)))
        self._alone = ExitStack()
        self.set_passes(passes)

    @property
    def reducer(self) -> Reducer:
        """Reducer of the parameters. Raises UsageError after `close`."""
        reducer = reducer_of(self.module)
        if reducer is None:
            raise UsageError(
                "this optimizer's gradients are not averaged any more: hvd.shutdown() was called, or another "
                "DistributedOptimizer has its parameters; make a new one"
            )
        return reducer

    def set_passes(self, passes: int) -> None:
        """Set the number of backward passes of a step. Raises UsageError for less than 1."""
        if passes < 1:
            raise UsageError(f"backward_passes_per_step = {passes}: a step has at least 1 backward pass")
        self._passes = passes
        self.restart()

    def restart(self) -> None:
        """Begin an accumulation: its backward passes but the last one stay on this rank."""
        self._counts = [0] * len(self._counts)
        self._complete = False
        self._alone.close()
        if self._passes > 1:
            self._alone.enter_context(self.reducer.accumulation.no_sync())

    def synchronize(self) -> None:
        """Average the gradients, unless the last backward pass has done so. Called by all ranks together."""
        self._check_parameters()
        if max(self._counts, default=0) < self._passes:
            self._alone.close()
            self.reducer.synchronize()
        self._counts = [0] * len(self._counts)
        self._complete = True

    def complete_for_step(self, skip: bool) -> None:
        """Average what a step needs. Raises UsageError where `skip` leaves gradients that were not averaged."""
        if self._complete:
            return
        if not skip:
            self.synchronize()
        elif max(self._counts, default=0) < self._passes:
            raise UsageError("step() in skip_synchronize(): call optimizer.synchronize() before it")

    def take_part(self) -> bool:
        """Take part in an average without gradients; return True if all ranks did so, because they have joined."""
        reducer = self.reducer
        reducer.zero_grad()
        self._alone.close()
        reducer.control.request("join")
        reducer.synchronize()
        return reducer.control.requested_by_all("join")

    def close(self) -> None:
        """Detach from the parameters."""
        if not self.closed:
            self.closed = True
            self._alone.close()
            for hook in self._hooks:
                hook.remove()
            self.reducer.release()

    def _count(self, number: int) -> None:
        if self._complete:
            self.restart()
        self._counts[number] += 1
        if self._counts[number] == self._passes:
            self._alone.close()
        elif self._counts[number] > self._passes:
            raise UsageError(
                f"a gradient was computed {self._counts[number]} times since the last step, and "
                f"backward_passes_per_step is {self._passes}: raise it, or call step() or zero_grad() more often"
            )

    def _check_parameters(self) -> None:
        if any(id(one) not in self.parameters for group in self.optimizer.param_groups for one in group["params"]):
            raise UsageError(
                "a parameter was added to the optimizer after DistributedOptimizer had it, so that nothing would "
                "average its gradient: make the DistributedOptimizer again, on all ranks"
            )


def _call(function: Any, number: int, _: torch.Tensor) -> None:
    function(number)


def _module_of(groups: list[dict[str, Any]], names: Mapping[int, str]) -> torch.nn.Module:
    """Return a module that holds the parameters of the groups under their names; those without one are numbered."""
    module = torch.nn.Module()
    for number, parameter in enumerate(one for group in groups for one in group["params"]):
        name = names.get(id(parameter), f"parameter {number}")
        module._parameters[name] = parameter  # register_parameter refuses dots, and names such as "type"
    return module
