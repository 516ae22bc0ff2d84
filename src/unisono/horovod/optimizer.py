"""Optimizer whose gradients are averaged over all ranks, under Horovod's name.

optimizer = DistributedOptimizer(optimizer, model.named_parameters())

backward()   gradients of a pass      ──▶ averaged while the pass runs, in buckets (`gradients.py`)
step()       no pass since the last   ──▶ this rank takes part without weight: the mean of the others
             averaged already         ──▶ the optimizer's own step
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from unisono.errors import UsageError
from unisono.horovod.collectives import allreduce
from unisono.horovod.compression import Compression, Compressor
from unisono.horovod.gradients import GradientExchange
from unisono.horovod.operations import ReduceOp
from unisono.horovod.session import session
from unisono.horovod.state import broadcast_optimizer_state, broadcast_parameters

NamedParameters = Iterable[tuple[str, torch.Tensor]]


def DistributedOptimizer(  # noqa: N802
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters | None = None,
    compression: Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
) -> Any:
    """Return `optimizer` itself, which from now on applies gradients that are averaged over all ranks.

    Called by all ranks together, which all get rank 0's weights. With `backward_passes_per_step` = k, the gradients of
    k passes are added up on each rank, and averaged in the last one. `step(closure)` averages after each call of the
    closure, its loss as well. `gradient_predivide_factor`, `num_groups` and `groups` are accepted and change nothing: a
    mean is the same however it is divided, and buckets are chosen from the first steps. Raises UsageError for another
    `op` than Average (for a sum, multiply the loss by the number of ranks), and where `named_parameters` lacks
    a parameter or has a name twice.
    """
    if op is not ReduceOp.AVERAGE:
        raise UsageError(f"DistributedOptimizer averages: for {op.name}, multiply the loss by hvd.size()")
    names = _names_of(optimizer, named_parameters)
    own = session()
    own.make_way(frozenset(id(one) for group in optimizer.param_groups for one in group["params"]))
    exchange = GradientExchange(optimizer, names, compression.wire, backward_passes_per_step, own.world)
    own.enter(exchange)
    base = type(optimizer)
    if not issubclass(base, _Distributed):
        optimizer.__class__ = type(base.__name__, (_Distributed, base), {})
        optimizer.register_step_pre_hook(_before_step)
        optimizer.register_step_post_hook(lambda one, *_: one.exchange.restart())
    optimizer.exchange, optimizer.skip = exchange, False  # type: ignore[attr-defined]
    return optimizer


class _Distributed:
    """Methods that Horovod's optimizers have besides those of the optimizer."""

    exchange: GradientExchange
    skip: bool

    def synchronize(self) -> None:
        """Average the gradients, unless that has been done: for a program that reads or clips them before the step."""
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
        """Set the number of backward passes of a step, from the next step on."""
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
    return (arguments[0], _averaged(optimizer.exchange, given)), {}


def _averaged(exchange: GradientExchange, closure: Callable[[], Any]) -> Callable[[], Any]:
    """Return a closure with the mean of all ranks' gradients and losses, so that all ranks take the same decisions."""

    def averaged() -> Any:
        exchange.restart()
        loss = closure()
        exchange.synchronize()
        return allreduce(loss.detach()) if isinstance(loss, torch.Tensor) else loss

    return averaged


def _names_of(optimizer: torch.optim.Optimizer, named_parameters: NamedParameters | None) -> dict[int, str]:
    """Return the names of the optimizer's parameters by their `id`; empty where none are given."""
    named = list(named_parameters or ())
    if len({name for name, _ in named}) < len(named):
        raise UsageError("named_parameters has a name twice: give model.named_parameters() of one model")
    names = {id(parameter): name for name, parameter in named}
    missing = sum(id(one) not in names for group in optimizer.param_groups for one in group["params"])
    if named and missing:
        raise UsageError(f"named_parameters lacks {missing} parameters of the optimizer: name all, or none")
    return names


def join(device: int = -1) -> int:
    """Wait until all ranks have called it; meanwhile, take part in their averages of gradients. Return the last rank.

    For ranks whose numbers of batches differ. A rank that has joined has no weight in an average, and gradients that it
    has not applied are dropped. At the end, all ranks get the weights and the optimizer's state of the last one. Only
    gradients are exchanged meanwhile: the others make no other collectives. Raises UsageError with more than one
    DistributedOptimizer in use.
    """
    own = session()
    if len(own.exchanges) > 1:
        raise UsageError(f"join() serves one DistributedOptimizer, and {len(own.exchanges)} are in use")
    averages = 0
    for exchange in own.exchanges if own.world.size > 1 else ():
        while not exchange.take_part():
            averages += 1
        exchange.reducer.zero_grad()
        exchange.restart()
    waited = own.wait(own.submit(lambda world: world.all_gather_object(averages)))
    last = max(rank for rank in range(own.world.size) if waited[rank] == min(waited))
    if max(waited) > min(waited):
        for exchange in own.exchanges:
            broadcast_parameters(exchange.module.parameters(), last)
            broadcast_optimizer_state(exchange.optimizer, last)
    return last
