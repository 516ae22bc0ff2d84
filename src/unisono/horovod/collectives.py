"""Collectives that a program calls itself, under Horovod's names; weights, optimizer state and objects of one rank for
all, and of all ranks for each.

    handle = allreduce_async(tensor)     the session's thread carries it out, after those submitted before
    poll(handle)                         False, until it is over
    synchronize(handle)                  waits, and returns the result

All ranks submit the same collectives in the same order, under the same names, of the same shapes; an error says both
calls. Functions that return a new tensor can be differentiated. Their gradients are Horovod's: those of a mean over
ranks of the loss where Horovod averages (`allgather`, `broadcast`), the reduction itself for an allreduce.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from unisono.errors import UsageError
from unisono.horovod.session import rank, session, size
from unisono.torch_backend.arguments import Reduction
from unisono.world import World

Handle = Future[Any]
TensorFunction = Callable[[torch.Tensor], torch.Tensor]


class ReduceOp(Enum):
    """Reduction over ranks."""

    AVERAGE = Reduction("sum", average=True)
    SUM = Reduction("sum")
    MIN = Reduction("minimum")
    MAX = Reduction("maximum")
    PRODUCT = Reduction("product")


Average, Sum = ReduceOp.AVERAGE, ReduceOp.SUM
Min, Max, Product = ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT


class Compressor(NamedTuple):
    """Wire between nodes; None sends the tensor's own dtype. Integers and 16-bit floats are sent as they are."""

    wire: str | None


class Compression:
    """Number formats between nodes. Sums are made in the tensor's own dtype; only transfers are narrow."""

    none = Compressor(None)
    fp16 = Compressor("float16")
    bf16 = Compressor("bfloat16")


def synchronize(handle: Any) -> Any:
    """Wait for a collective, or for each of a list, and return its result. Raises its error."""
    return [session().wait(item) for item in handle] if isinstance(handle, list) else session().wait(handle)


def poll(handle: Any) -> bool:
    """Return True when a collective, or each of a list, is over."""
    return all(item.done() for item in handle) if isinstance(handle, list) else handle.done()


def barrier() -> None:
    """Wait until all ranks have called it, and all collectives submitted before it are over."""
    synchronize(session().submit(lambda world: world.barrier()))


class _Differentiable(torch.autograd.Function):
    """Function of a tensor with the function that returns its gradient, given that of the result: it can be
    differentiated, too."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, function: TensorFunction, gradient: TensorFunction) -> torch.Tensor:
        ctx.gradient = gradient
        return function(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.gradient(grads[0]), None, None


_differentiable: Callable[[torch.Tensor, TensorFunction, TensorFunction], torch.Tensor] = _Differentiable.apply


# Reductions


class _ScaledReduction(NamedTuple):
    """Reduction with the factors before and after it, and the number format between nodes."""

    op: ReduceOp
    before: float
    after: float
    compression: Compressor

    def label(self, function: str, name: str | None, tensor: torch.Tensor) -> str:
        """Return what all ranks compare: also the op, and factors other than 1. Raises UsageError for bools' means."""
        factors = (("prescale", self.before), ("postscale", self.after))
        scaling = "".join(f", {word} {float(factor)}" for word, factor in factors if factor != 1)
        if tensor.dtype is torch.bool and (self.op is Average or scaling):
            raise UsageError(
                f"{function} of torch.bool by {self.op.name}{scaling}: bools have no mean, and take no factors; "
                "allreduce them by hvd.Max (any rank) or hvd.Min (all ranks), or convert them"
            )
        return f"{_label(function, name, tensor.shape)} by {self.op.name}{scaling}"

    def reduce(self, tensor: torch.Tensor, world: World) -> torch.Tensor:
        """Reduce a tensor in place, and return it."""
        detached = tensor.detach()
        _scale(detached, self.before)
        world.allreduce(detached, wire=self.compression.wire, op=self.op.value.op)
        self._finish(detached, world.size)
        return tensor

    def reduce_scatter(self, tensor: torch.Tensor, world: World) -> torch.Tensor:
        """Return this rank's part of the reduction along dimension 0."""
        least, more = divmod(tensor.shape[0], world.size)
        if more:  # shares of whole rows differ, a schedule's chunks do not end with rows
            begin = world.rank * least + min(world.rank, more)
            rows = least + (world.rank < more)
            return self.reduce(tensor.clone(), world)[begin : begin + rows].clone()
        source = tensor.clone()
        _scale(source, self.before)
        part = world.reduce_scatter(source, wire=self.compression.wire).view(least, *tensor.shape[1:])
        self._finish(part, world.size)
        return part

    def _finish(self, tensor: torch.Tensor, ranks: int) -> None:
        if self.op is Average and self.after != 1 and not (tensor.is_floating_point() or tensor.is_complex()):
            _scale(tensor, self.after, ranks)  # in one, as an integer is cut off
        else:
            self.op.value.after(tensor, ranks)
            _scale(tensor, self.after)


def _scale(tensor: torch.Tensor, factor: float, divisor: int = 1) -> None:
    """Multiply by factor / divisor in place; integers by a whole number exactly, by another in float64."""
    if factor == divisor:
        return
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.mul_(factor / divisor)
    elif (quotient := int(factor / divisor)) * divisor == factor:
        tensor.mul_(quotient)
    else:
        tensor.copy_(tensor.double() * factor / divisor)


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
    for the mean of bools, and for factors of them.
    """
    if average is not None and op is not None:
        raise UsageError("allreduce takes average or op, not both")
    chosen = op or (Sum if average is False else Average)
    reduction = _ScaledReduction(chosen, prescale_factor, postscale_factor, compression)
    return session().submit(partial(reduction.reduce, tensor), reduction.label("allreduce", name, tensor))


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
    options = average, name, op, prescale_factor, postscale_factor, compression

    def gradient(grad: torch.Tensor) -> torch.Tensor:
        if op not in (None, Average, Sum):
            raise UsageError(f"allreduce with {op.name} has no gradient: use Average or Sum")
        return allreduce(grad, average, name, compression, op, prescale_factor, postscale_factor)

    return _differentiable(tensor, lambda source: synchronize(allreduce_async(source, *options)), gradient)


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
    reduction = _ScaledReduction(op, prescale_factor, postscale_factor, compression)
    scatter = partial(reduction.reduce_scatter, tensor.detach())
    return session().submit(scatter, reduction.label("reducescatter", name, tensor))


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's part of the reduction along dimension 0. First ranks get one more if p does not divide it.

    Differentiable; as in Horovod, the gradient of a mean is not divided again, and that of a sum is multiplied by p.
    """
    options = name, op, prescale_factor, postscale_factor, compression

    def gradient(grad: torch.Tensor) -> torch.Tensor:
        factor = prescale_factor * postscale_factor * (size() if op is Sum else 1)
        return allgather(grad * factor)

    return _differentiable(tensor, lambda source: synchronize(reducescatter_async(source, *options)), gradient)


# Copies


def allgather_async(tensor: torch.Tensor, name: str | None = None) -> Handle:
    """Concatenate the tensors of all ranks along dimension 0, in rank order; they may differ in its size."""
    if not tensor.dim():
        raise UsageError("allgather concatenates along dimension 0, and a scalar has none: give it as a tensor of [1]")
    return session().submit(partial(_gather, tensor.detach()), _label("allgather", name, tensor.shape[1:]))


def _gather(tensor: torch.Tensor, world: World) -> torch.Tensor:
    rows = torch.empty(world.size, dtype=torch.int64)
    world.all_gather(torch.tensor([tensor.shape[0]]), rows)
    out = tensor.new_empty((int(rows.sum()), *tensor.shape[1:]))
    world.all_to_all_v([tensor.contiguous()] * world.size, torch.split(out, rows.tolist()))
    return out


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Return the tensors of all ranks, concatenated along dimension 0 in rank order.

    Differentiable: the gradient is this rank's part of the mean of all ranks' gradients.
    """
    own_rows = tensor.shape[0] if tensor.dim() else 0

    def gradient(grad: torch.Tensor) -> torch.Tensor:
        rows = synchronize(allgather_async(torch.tensor([own_rows]))).tolist()
        begin = sum(rows[: rank()])
        return allreduce(grad)[begin : begin + own_rows]

    return _differentiable(tensor, lambda source: synchronize(allgather_async(source, name)), gradient)


def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Handle:
    """Fill `tensor` with that of `root_rank`; the handle's result is the tensor."""
    return session().submit(partial(_broadcast, tensor, root_rank), _label("broadcast", name, tensor.shape))


def _broadcast(tensor: torch.Tensor, root: int, world: World) -> torch.Tensor:
    if not 0 <= root < world.size:
        raise UsageError(f"broadcast from rank {root}: the ranks are 0 to {world.size - 1}")
    world.broadcast(tensor.detach(), root)
    return tensor


def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Handle:
    """Fill a copy of `tensor` with that of `root_rank`."""
    return broadcast_async_(tensor.detach().clone(), root_rank, name)


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Fill `tensor` with that of `root_rank`, and return it."""
    synchronize(broadcast_async_(tensor, root_rank, name))
    return tensor


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Return the tensor of `root_rank`.

    Differentiable: the gradient is the mean of all ranks' gradients at the root, and 0 elsewhere.
    """

    def gradient(grad: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.tensor(rank() == root_rank), allreduce(grad), 0)

    return _differentiable(tensor, lambda source: synchronize(broadcast_async(source, root_rank, name)), gradient)


def alltoall_async(tensor: torch.Tensor, splits: Any = None, name: str | None = None) -> Handle:
    """Send part d of `tensor` along dimension 0 to rank d; see `alltoall`."""
    exchange = partial(_all_to_all, tensor.detach(), splits)
    return session().submit(exchange, _label("alltoall", name, tensor.shape[1:]))


def _part_sizes(rows: int, splits: Any, ranks: int) -> torch.Tensor:
    """Return the rows that each rank gets. Raises UsageError for splits that do not fit."""
    if splits is None and rows % ranks:
        raise UsageError(f"alltoall: {ranks} ranks do not divide {rows} rows: give splits")
    sizes = torch.full((ranks,), rows // ranks) if splits is None else torch.as_tensor(splits).long()
    if len(sizes) != ranks or int(sizes.sum()) != rows or bool((sizes < 0).any()):
        raise UsageError(f"alltoall: splits {sizes.tolist()} do not cut {rows} rows into {ranks} parts")
    return sizes


def _all_to_all(tensor: torch.Tensor, splits: Any, world: World) -> Any:
    rows = tensor.shape[0] if tensor.dim() else 0
    sizes = world.call_on_all(lambda: _part_sizes(rows, splits, world.size))
    received = world.all_to_all(sizes.clone())
    out = tensor.new_empty((int(received.sum()), *tensor.shape[1:]))
    world.all_to_all_v(torch.split(tensor.contiguous(), sizes.tolist()), torch.split(out, received.tolist()))
    return out, received if splits is None else received.to(torch.as_tensor(splits).dtype)


def alltoall(tensor: torch.Tensor, splits: Any = None, name: str | None = None) -> Any:
    """Return the parts that all ranks have sent to this one, concatenated in rank order.

    `splits` gives the sizes of the parts along dimension 0; without it they are equal. With it the result is a pair:
    the tensor, and the sizes of the parts that were received. Differentiable: gradients are sent back.
    """
    received: list[torch.Tensor] = []

    def exchange(source: torch.Tensor) -> torch.Tensor:
        out, sizes = synchronize(alltoall_async(source, splits, name))
        received.append(sizes)
        return out  # type: ignore[no-any-return]

    def gradient(grad: torch.Tensor) -> torch.Tensor:
        return alltoall(grad, received[0])[0]  # type: ignore[no-any-return]

    out = _differentiable(tensor, exchange, gradient)
    return out if splits is None else (out, received[0])


def _label(function: str, name: str | None, shape: torch.Size) -> str:
    """Return what all ranks compare: the function, the name, and the part of the shape that is equal on all."""
    return f"for {function}{f' of {name!r}' if name else ''}, rows of {list(shape)}"


# Weights, optimizer state and Python objects

Object = TypeVar("Object")


def broadcast_object(obj: Object, root_rank: int = 0, name: str | None = None) -> Object:
    """Return the object of `root_rank`, pickled, on every rank. Raises UsageError on all where that fails."""
    if not 0 <= root_rank < size():
        raise UsageError(f"broadcast_object from rank {root_rank}: the ranks are 0 to {size() - 1}")
    return allgather_object(obj if rank() == root_rank else None, name)[root_rank]  # type: ignore[return-value]


def allgather_object(obj: Object, name: str | None = None) -> list[Object]:
    """Return every rank's object, pickled, in rank order. Raises UsageError on all ranks where that fails on one."""

    def gather(world: World) -> list[bytes]:
        return world.all_gather_object(world.call_on_all(lambda: _pickled(obj)))

    active = session()
    return [pickle.loads(data) for data in active.wait(active.submit(gather, name))]


def _pickled(obj: object) -> bytes:
    try:
        return pickle.dumps(obj)
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # what pickle raises for lambdas and the like
        raise UsageError(f"the object cannot be pickled: {error}") from error


def broadcast_parameters(
    params: Mapping[str, object] | Iterable[tuple[str, torch.Tensor] | torch.Tensor], root_rank: int = 0
) -> None:
    """Copy the tensors of `root_rank` to all ranks: of a `state_dict()`, of `named_parameters()`, or of a list.

    Those with names are matched by them, in whatever order each rank gives them.
    """
    pairs = params.items() if isinstance(params, Mapping) else params
    named = [pair if isinstance(pair, tuple) and len(pair) == 2 else ("", pair) for pair in pairs]
    for name, tensor in sorted(named, key=lambda pair: str(pair[0])):
        if isinstance(tensor, torch.Tensor):
            broadcast_(tensor, root_rank, name)
        elif not isinstance(params, Mapping):
            raise UsageError(f"broadcast_parameters takes tensors, or pairs of a name and a tensor, not {type(tensor)}")


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, model: torch.nn.Module | None = None
) -> None:
    """Load the state and the options (learning rate, ...) of `root_rank`'s optimizer on all ranks."""
    is_root, state_dict = rank() == root_rank, optimizer.state_dict()
    shapes = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), state_dict["state"])
    shapes, groups = broadcast_object((shapes, state_dict["param_groups"]), root_rank)
    if is_root:
        state = tree_map_only(torch.Tensor, torch.Tensor.cpu, state_dict["state"])
    else:
        state = tree_map_only(torch.Tensor, partial(torch.empty_like, device="cpu"), shapes)
    broadcast_parameters([leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)], root_rank)
    optimizer.load_state_dict({"state": state, "param_groups": groups})  # on all: it may change a tensor's dtype
