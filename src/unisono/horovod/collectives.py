"""Collectives that a program calls itself, under Horovod's names.

    handle = allreduce_async(tensor)     the session's thread carries it out, after those submitted before
    poll(handle)                         False, until it is over
    synchronize(handle)                  waits, and returns the result

All ranks submit the same collectives in the same order, under the same names, of the same shapes; an error says both
calls. Functions that return a new tensor can be differentiated. Their gradients are Horovod's: those of a mean over
ranks of the loss where Horovod averages (`allgather`, `broadcast`), the reduction itself for an allreduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from unisono.errors import UsageError
from unisono.horovod import operations
from unisono.horovod.compression import Compression, Compressor
from unisono.horovod.operations import ReduceOp
from unisono.horovod.session import session

Handle = Future[Any]

Average, Sum = ReduceOp.AVERAGE, ReduceOp.SUM
Min, Max, Product = ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT


def synchronize(handle: Any) -> Any:
    """Wait for a collective, or for each of a list, and return its result. Raises its error."""
    return [session().wait(one) for one in handle] if isinstance(handle, list) else session().wait(handle)


def poll(handle: Any) -> bool:
    """Return True when a collective, or each of a list, is over."""
    return all(one.done() for one in handle) if isinstance(handle, list) else handle.done()


def barrier() -> None:
    """Wait until all ranks have called it, and all collectives submitted before it are over."""
    synchronize(session().submit(lambda world: world.barrier()))


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Compressor = Compression.none,
) -> Handle:
    """Reduce `tensor` over all ranks, in place; the handle's result is the tensor.

    `op` is the mean where neither it nor `average` is given. An integer mean is cut off towards 0. Raises UsageError
    for the mean of bools.
    """
    chosen = _chosen(average, op)
    if chosen is Average and tensor.dtype is torch.bool:
        raise UsageError("allreduce: bools have no mean; give op=hvd.Max (any rank) or op=hvd.Min (all ranks)")
    reduce = partial(operations.reduce, tensor, chosen, prescale_factor, postscale_factor, compression.wire)
    return session().submit(reduce, _label("allreduce", name, tensor.shape))


def allreduce_async(tensor: torch.Tensor, *options: Any, **named: Any) -> Handle:
    """Reduce a copy of `tensor`; the options are those of `allreduce_async_`."""
    return allreduce_async_(tensor.detach().clone(), *options, **named)


def allreduce_(tensor: torch.Tensor, *options: Any, **named: Any) -> torch.Tensor:
    """Reduce `tensor` over all ranks, in place, and return it; the options are those of `allreduce_async_`."""
    synchronize(allreduce_async_(tensor, *options, **named))
    return tensor


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return the reduction of `tensor` over all ranks. Differentiable; the options are those of `allreduce_async_`."""
    options = (average, name, op, prescale_factor, postscale_factor, compression)
    return _Allreduce.apply(tensor, options)  # type: ignore[no-any-return]


def grouped_allreduce_async_(tensors: Sequence[torch.Tensor], *options: Any, **named: Any) -> list[Handle]:
    """Reduce each of `tensors`, in place; the options are those of `allreduce_async_`."""
    return [allreduce_async_(tensor, *options, **named) for tensor in tensors]


def grouped_allreduce_async(tensors: Sequence[torch.Tensor], *options: Any, **named: Any) -> list[Handle]:
    """Reduce a copy of each of `tensors`; the options are those of `allreduce_async_`."""
    return [allreduce_async(tensor, *options, **named) for tensor in tensors]


def grouped_allreduce_(tensors: Sequence[torch.Tensor], *options: Any, **named: Any) -> list[torch.Tensor]:
    """Reduce each of `tensors`, in place, and return them; the options are those of `allreduce_async_`."""
    return list(synchronize(grouped_allreduce_async_(tensors, *options, **named)))


def grouped_allreduce(tensors: Sequence[torch.Tensor], *options: Any, **named: Any) -> list[torch.Tensor]:
    """Return the reduction of each of `tensors`. Differentiable; the options are those of `allreduce`."""
    return [allreduce(tensor, *options, **named) for tensor in tensors]


def allgather_async(tensor: torch.Tensor, name: str | None = None) -> Handle:
    """Concatenate the tensors of all ranks along dimension 0, in rank order; they may differ in its size."""
    if not tensor.dim():
        raise UsageError("allgather concatenates along dimension 0, and a scalar has none: give it as a tensor of [1]")
    gather = partial(operations.gather, tensor.detach())
    return session().submit(gather, _label("allgather", name, tensor.shape[1:]))


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Return the tensors of all ranks, concatenated along dimension 0 in rank order. Differentiable."""
    return _Allgather.apply(tensor, name)  # type: ignore[no-any-return]


def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Handle:
    """Fill `tensor` with that of `root_rank`; the handle's result is the tensor."""
    broadcast = partial(operations.broadcast, tensor, root_rank)
    return session().submit(broadcast, _label("broadcast", name, tensor.shape))


def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Handle:
    """Fill a copy of `tensor` with that of `root_rank`."""
    return broadcast_async_(tensor.detach().clone(), root_rank, name)


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Fill `tensor` with that of `root_rank`, and return it."""
    synchronize(broadcast_async_(tensor, root_rank, name))
    return tensor


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Return the tensor of `root_rank`. Differentiable."""
    return _Broadcast.apply(tensor, root_rank, name)  # type: ignore[no-any-return]


def alltoall_async(tensor: torch.Tensor, splits: Any = None, name: str | None = None) -> Handle:
    """Send part d of `tensor` along dimension 0 to rank d; see `alltoall`."""
    exchange = partial(operations.all_to_all, tensor.detach(), splits)
    return session().submit(exchange, _label("alltoall", name, tensor.shape[1:]))


def alltoall(tensor: torch.Tensor, splits: Any = None, name: str | None = None) -> Any:
    """Return the parts that all ranks have sent to this one, concatenated in rank order. Differentiable.

    `splits` gives the sizes of the parts along dimension 0; without it they are equal. With it the result is a pair:
    the tensor, and the sizes of the parts that were received.
    """
    out, received = _Alltoall.apply(tensor, splits, name)
    return out if splits is None else (out, received)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Compressor = Compression.none,
) -> Handle:
    """Reduce `tensor` over all ranks, and keep this rank's part along dimension 0; see `reducescatter`."""
    if op not in (Average, Sum):
        raise UsageError(f"reducescatter gives Average or Sum, not {op.name}")
    if not tensor.dim():
        raise UsageError("reducescatter cuts dimension 0, and a scalar has none")
    reduce = partial(
        operations.reduce_scatter, tensor.detach(), op, prescale_factor, postscale_factor, compression.wire
    )
    return session().submit(reduce, _label("reducescatter", name, tensor.shape))


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's part of the reduction along dimension 0. First ranks get one more if p does not divide it.

    Differentiable.
    """
    options = (op, prescale_factor, postscale_factor, compression)
    return _Reducescatter.apply(tensor, name, options)  # type: ignore[no-any-return]


def _chosen(average: bool | None, op: ReduceOp | None) -> ReduceOp:
    if average is not None and op is not None:
        raise UsageError("allreduce takes average or op, not both")
    return op or (Sum if average is False else Average)


def _label(function: str, name: str | None, shape: torch.Size) -> str:
    """Return what all ranks compare: the function, the name, and the part of the shape that is equal on all."""
    return f"for {function}{f' of {name!r}' if name else ''}, rows of {list(shape)}"


class _Allreduce(torch.autograd.Function):
    """Reduction whose gradient is the same reduction."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, options: tuple[Any, ...]) -> torch.Tensor:
        ctx.options = options
        return synchronize(allreduce_async(tensor, *options))  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.options[2] not in (None, Average, Sum):
            raise UsageError(f"allreduce with {ctx.options[2].name} has no gradient: use Average or Sum")
        return synchronize(allreduce_async(grads[0], *ctx.options)), None


class _Allgather(torch.autograd.Function):
    """Concatenation; its gradient is this rank's part of the mean of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None) -> torch.Tensor:
        ctx.rows = tensor.shape[0] if tensor.dim() else 0
        return synchronize(allgather_async(tensor, name))  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        rows = synchronize(allgather_async(torch.tensor([ctx.rows]))).tolist()
        begin = sum(rows[: session().world.rank])
        return synchronize(allreduce_async(grads[0]))[begin : begin + ctx.rows], None


class _Broadcast(torch.autograd.Function):
    """Copy of the root's tensor; its gradient is the mean of all ranks' gradients at the root, and 0 elsewhere."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None) -> torch.Tensor:
        ctx.root = root_rank
        return synchronize(broadcast_async(tensor, root_rank, name))  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        mean = synchronize(allreduce_async(grads[0]))
        return (mean if session().world.rank == ctx.root else torch.zeros_like(mean)), None, None


class _Alltoall(torch.autograd.Function):
    """Exchange of parts; its gradient sends the parts back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None) -> tuple[torch.Tensor, torch.Tensor]:
        out, ctx.received = synchronize(alltoall_async(tensor, splits, name))
        ctx.mark_non_differentiable(ctx.received)
        return out, ctx.received

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return synchronize(alltoall_async(grads[0], ctx.received))[0], None, None


class _Reducescatter(torch.autograd.Function):
    """Reduction of which a part is kept; its gradient is all ranks' gradients, concatenated.

    As in Horovod, a mean is not divided again, and a sum is multiplied by the number of ranks.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, options: tuple[Any, ...]) -> torch.Tensor:
        ctx.options = options
        return synchronize(reducescatter_async(tensor, name, *options))  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        op, before, after, _ = ctx.options
        scale = before * after * (session().world.size if op is Sum else 1)
        return synchronize(allgather_async(grads[0] * scale)), None, None
