"""Optimizer whose gradients are averaged over all ranks, under Horovod's name.

    optimizer = DistributedOptimizer(optimizer, model.named_parameters())

    backward() 1 .. k-1     gradients add up on this rank
    backward() k            averaged in buckets while the pass runs     complete
    step()                  averages what is not complete, then the optimizer's own step: a new accumulation begins;
                            with no pass since the last, this rank takes part without weight: the mean of the others
    synchronize()           the same without the step; the next gradient begins a new accumulation
    zero_grad()             a new accumulation begins

The averages are made by the reducer that serves `unisono.parallel`; a module that holds the optimizer's parameters
stands for the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from numbers import Real
from typing import Any

import torch

from unisono.data_parallel import parallel
from unisono.engine import weakly
from unisono.errors import UsageError
from unisono.horovod.collectives import (
    Compression,
    Compressor,
    ReduceOp,
    allreduce,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from unisono.horovod.session import session
from unisono.reducer import Reducer, reducer_of
from unisono.rules import BSP, Exchange
from unisono.world import World

NamedParameters = Iterable[tuple[str, torch.Tensor]]

REMEDY = "make the DistributedOptimizer again, on all ranks"


def DistributedOptimizer(  # noqa: N802
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters | None = None,
    compression: Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
) -> Any:
    """Return `optimizer` itself, which from now on applies gradients that are averaged over all ranks.

    Called by all ranks together, which all get rank 0's weights. With `backward_passes_per_step` = k, the gradients of
    k passes are added up on each rank, and averaged in the last one. `step(closure)` averages after each call of the
    closure, its loss as well, a tensor or a number. `gradient_predivide_factor`, `num_groups` and `groups` are accepted
    and change nothing: a mean is the same however it is divided, and buckets are chosen from the first steps. Raises
    UsageError for another `op` than Average (for a sum, multiply the loss by the number of ranks), and where
    `named_parameters` lacks a parameter or has a name twice, and for `sparse_as_dense`.
    """
    if sparse_as_dense:
        raise UsageError("sparse_as_dense: there are no sparse gradients; make the embeddings with sparse=False")
    if op is not ReduceOp.AVERAGE:
        raise UsageError(f"DistributedOptimizer averages: for {op.name}, multiply the loss by hvd.size()")
    names = _names_of(optimizer, named_parameters)
    active = session()
    active.make_way(frozenset(map(id, _parameters_of(optimizer))))
    exchange = GradientExchange(optimizer, names, compression.wire, backward_passes_per_step, active.world)
    active.enter(exchange)
    base = type(optimizer)
    if not issubclass(base, _Distributed):
        optimizer.__class__ = type(base.__name__, (_Distributed, base), {})
        optimizer.register_step_pre_hook(_before_step)
        optimizer.register_step_post_hook(lambda stepped, *_: stepped.exchange.restart())
    optimizer.exchange, optimizer.skip = exchange, False  # type: ignore[attr-defined]
    return optimizer


class _Distributed:
    """Methods that Horovod's optimizers have besides those of the optimizer."""

    exchange: GradientExchange
    skip: bool

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what a copy is made of, and a pickle: the optimizer as it was before, whose gradients stay local."""
        return object.__new__, (type(self).__bases__[1],), self.__getstate__()

    def synchronize(self) -> None:
        """Average the gradients, for a program that reads or clips them before the step, which leaves them then."""
        self.exchange.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step()` within the block apply the gradients as they are, after `synchronize()`."""
        self.skip = True
        try:
            yield
        finally:
            self.skip = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes of a step. An accumulation begins: call it between steps."""
        self.exchange.set_passes(passes)

    def zero_grad(self, *arguments: Any, **named: Any) -> None:
        """Clear the gradients, as the optimizer does; an accumulation begins."""
        super().zero_grad(*arguments, **named)  # type: ignore[misc]
        if not self.exchange.closed:
            self.exchange.restart()


def _before_step(optimizer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Average the gradients of a step; with a closure, return arguments whose closure does so."""
    given = named.get("closure", arguments[1] if len(arguments) > 1 else None)
    if given is None:
        optimizer.exchange.complete_for_step(optimizer.skip)
        return None
    return (arguments[0], partial(_averaged, optimizer.exchange, given)), {}


def _averaged(exchange: GradientExchange, closure: Callable[[], Any]) -> Any:
    """Call a closure; return the mean of all ranks' losses, and average the gradients: all take the same decisions."""
    exchange.restart()
    loss = closure()
    exchange.synchronize()
    if isinstance(loss, Real):
        return allreduce(torch.tensor(float(loss), dtype=torch.float64)).item()
    if loss is not None and not isinstance(loss, torch.Tensor):
        raise UsageError(f"a closure returned a {type(loss).__name__}: return a tensor, a number or None")
    return None if loss is None else allreduce(loss.detach())


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _names_of(optimizer: torch.optim.Optimizer, named_parameters: NamedParameters | None) -> dict[int, str]:
    """Return the names of the optimizer's parameters by their `id`; empty where none are given."""
    named = list(named_parameters or ())
    if len({name for name, _ in named}) < len(named):
        raise UsageError("named_parameters has a name twice: give model.named_parameters() of one model")
    names = {id(parameter): name for name, parameter in named}
    missing = sum(id(parameter) not in names for parameter in _parameters_of(optimizer))
    if named and missing:
        raise UsageError(f"named_parameters lacks {missing} parameters of the optimizer: name all, or none")
    return names


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
        self.module = torch.nn.Module()
        """Module that holds the parameters, under their names; those without one are numbered."""
        for index, parameter in enumerate(_parameters_of(optimizer)):  # register_parameter refuses dots, and "type"
            self.module._parameters[names.get(id(parameter), f"parameter {index}")] = parameter
        parameters = list(self.module.parameters())
        self.parameters = frozenset(map(id, parameters))
        """Identities of the optimizer's parameters."""
        self.closed = False
        self._counts = [0] * len(parameters)
        """Backward passes that have reached each parameter in this accumulation."""
        self._complete = False  # whether this accumulation was averaged on demand, and the next gradient begins another
        count = weakly(self._count)
        self._hooks = [  # before the reducer's: the first gradient of the last pass begins the average
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: count(index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(parameters)
            if parameter.requires_grad
        ]
        parallel(self.module, world, BSP(exchange=Exchange(wire=wire)))
        self.reducer.structure.remedy = REMEDY
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
        if any(id(parameter) not in self.parameters for parameter in _parameters_of(self.optimizer)):
            raise UsageError(
                "a parameter was added to the optimizer after DistributedOptimizer had it, so that nothing would "
                f"average its gradient: {REMEDY}"
            )
        if max(self._counts, default=0) < self._passes:
            self._alone.close()
            self.reducer.synchronize()
        elif self.reducer.programs.collectives.size > 1 and self.reducer.accumulation.has_gradients():
            raise UsageError(
                "gradients were set after backward(), whose average lacks them: set them before it, or add the losses "
                "and make one backward pass; for those made of the average, call optimizer.synchronize() before that"
            )
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

    def _count(self, index: int) -> None:
        if self._complete:
            self.restart()
        self._counts[index] += 1
        if self._counts[index] == self._passes:
            self._alone.close()
        elif self._counts[index] > self._passes:
            raise UsageError(
                f"a gradient was computed {self._counts[index]} times since the last step, and "
                f"backward_passes_per_step is {self._passes}: raise it, or call step() or zero_grad() more often"
            )


def join(device: int = -1) -> int:
    """Wait until all ranks have called it; meanwhile, take part in their averages of gradients. Return the last rank.

    For ranks whose numbers of batches differ. A rank that has joined has no weight in an average, and gradients that it
    has not applied are dropped. At the end, all ranks get the weights and the optimizer's state of the last one. Only
    gradients are exchanged meanwhile: the others make no other collectives. Raises UsageError with more than one
    DistributedOptimizer in use.
    """
    active = session()
    if len(active.exchanges) > 1:
        raise UsageError(f"join() serves one DistributedOptimizer, and {len(active.exchanges)} are in use")
    averages = 0
    for exchange in active.exchanges if active.world.size > 1 else ():
        while not exchange.take_part():
            averages += 1
        exchange.reducer.zero_grad()
        exchange.restart()
    waited = active.wait(active.submit(lambda world: world.all_gather_object(averages)))
    last = max(rank for rank in range(active.world.size) if waited[rank] == min(waited))
    if max(waited) > min(waited):
        for exchange in active.exchanges:
            broadcast_parameters(exchange.module.parameters(), last)
            broadcast_optimizer_state(exchange.optimizer, last)
    return last
