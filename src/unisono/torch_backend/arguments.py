"""PyTorch's arguments in terms of ours: reductions, lists and rows of tensors, and sparse tensors.

SUM                                      sum
AVG                                      sum, then divided by the number of ranks
PREMUL_SUM                               multiplied by a factor of each rank's, then sum
[a a] [b b]  ◀── copied ──  a a b b      gathered side by side between nodes when all are as long, else each by itself
[a] [b b b]  ── filled ──▶  a - - b b b  parts that are to be reduced are filled up to the longest
tensor, root, op, timeout  ─────▶        [tensor], Options of PyTorch: the signatures of a ProcessGroup as one
3:a 7:b      ── gathered ──▶             sparse elements of all ranks, added up in the order of ranks
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from unisono.collectives.all_gather import all_gather, all_gather_v, check_gather
from unisono.collectives.checks import Checks, check_output, check_parts
from unisono.collectives.group import Group
from unisono.collectives.payload import name_of
from unisono.errors import TensorError
from unisono.torch_backend.pytorch import ReduceOp, c10d

Kind = ReduceOp.RedOpType

UNDIVIDED = (torch.bool, torch.uint16, torch.uint32, torch.uint64)
"""Dtypes with sums, but without averages."""


class Reduction(NamedTuple):
    """Reduction of PyTorch, as steps before, in and after the exchange."""

    op: str
    """Name of the op in the collectives."""
    factor: Any = None
    """Factor by which each rank first multiplies its tensor, a number or a tensor; None for none."""
    average: bool = False
    """True if the sum is divided by the number of ranks."""
    label: str = ""
    """The step before or after the exchange in words, which ranks compare; empty for none."""

    def check(self, group: Group, tensor: torch.Tensor) -> None:
        """Raise TensorError for an average of a dtype that PyTorch does not divide."""
        if self.average and tensor.dtype in UNDIVIDED:
            name = name_of(tensor.dtype)
            raise TensorError(f"rank {group.rank}: a tensor of {name} cannot be averaged; sum it, or convert it before")

    def before(self, tensor: torch.Tensor, copy: bool) -> torch.Tensor:
        """Return the input of the exchange: `tensor` itself, or with `copy` never the same memory if it is changed."""
        if self.factor is None:
            return tensor
        return (tensor.clone() if copy else tensor).mul_(self.factor)

    def after(self, tensor: torch.Tensor, ranks: int) -> None:
        """Apply the step after the exchange in place: divide an average by the number of ranks, truncating integers."""
        if self.average:
            divides = tensor.is_floating_point() or tensor.is_complex()
            tensor.div_(ranks, rounding_mode=None if divides else "trunc")


REDUCTIONS = {
    Kind.SUM: Reduction("sum"),
    Kind.AVG: Reduction("sum", average=True, label=" averaged"),
    Kind.PRODUCT: Reduction("product"),
    Kind.MIN: Reduction("minimum"),
    Kind.MAX: Reduction("maximum"),
    Kind.BAND: Reduction("and"),
    Kind.BOR: Reduction("or"),
    Kind.BXOR: Reduction("xor"),
}
"""Reductions by PyTorch's kind; that of PREMUL_SUM has a factor of its own."""


def reduction_of(op: Any) -> Reduction:
    """Return the reduction for PyTorch's `op`. Raises TensorError for an unknown one."""
    kind = getattr(op, "op", op)
    if kind == Kind.PREMUL_SUM:
        return Reduction("sum", op.factor, label=" with factors")
    if kind not in REDUCTIONS:
        known = ", ".join(reduction.name for reduction in (*REDUCTIONS, Kind.PREMUL_SUM))
        raise TensorError(f"cannot reduce by {kind}; there are {known}")
    return REDUCTIONS[kind]


SIGNATURES: dict[str, tuple[Sequence[int], Any]] = {
    "allreduce": ([1], c10d.AllreduceOptions),
    "broadcast": ([1], c10d.BroadcastOptions),
    "reduce": ([1], c10d.ReduceOptions),
    "allgather": ([2, 1], c10d.AllgatherOptions),
    "gather": ([2, 1], c10d.GatherOptions),
    "scatter": ([1, 2], c10d.ScatterOptions),
    "reduce_scatter": ([1, 2], c10d.ReduceScatterOptions),
    "alltoall": ([1, 1], c10d.AllToAllOptions),
    "all_to_all_single": ([0] * 4, c10d.AllToAllOptions),
}
"""Operations of a ProcessGroup with further signatures: how deep their tensors lie in lists, and their options."""

SETTINGS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}
"""Fields of the options by the name of the argument that stands for them."""


def in_lists(name: str, arguments: Sequence[Any], named: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return the arguments of operation `name` in its first signature: tensors in lists, and options.

    Raises TensorError where an argument after the tensors is none of the known ones.
    """
    if name not in SIGNATURES:
        return arguments, named
    depths, options = SIGNATURES[name]
    if not arguments:
        raise TensorError(f"{name} with {[*named]} by keyword: give the tensors by position")
    if hasattr(arguments[-1], "asyncOp") and (not depths[0] or torch.Tensor not in map(type, arguments)):
        return arguments, named  # as torch.distributed calls it
    tensors = [_listed(argument, depth) for argument, depth in zip(arguments, depths, strict=False)]
    rest = named | {_kind_of(value): value for value in arguments[len(depths) :]}
    settings = {SETTINGS[kind]: rest.pop(kind) for kind in SETTINGS if kind in rest}
    opts = rest.get("opts")
    if opts is not None and not hasattr(opts, "asyncOp"):
        raise TensorError(f"{name} with {opts!r}; after the tensors it takes {options.__name__}, or {[*SETTINGS]}")
    if settings:
        rest["opts"] = options()
        for field, value in settings.items():
            if value is not None:
                setattr(rest["opts"], field, value)
    return tensors, rest


def _listed(tensors: Any, depth: int) -> Any:
    """Return tensors in lists of that depth, or what holds none as it is."""
    inner = tensors
    while isinstance(inner, (list, tuple)) and inner:
        inner, depth = inner[0], depth - 1
    for _ in range(depth if isinstance(inner, torch.Tensor) else 0):
        tensors = [tensors]
    return tensors


def _kind_of(value: Any) -> str:
    if isinstance(value, (ReduceOp, Kind)):
        return "op"
    return "root" if isinstance(value, int) else "timeout" if isinstance(value, timedelta) else "opts"


def gather_list(group: Group, parts: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
    """Gather every rank's `tensor` on all ranks: parts[r] receives rank r's. Sizes may differ between ranks."""
    if group.one_node or len(parts) != group.size or any(part.numel() != parts[0].numel() for part in parts):
        all_gather_v(group, tensor, parts)
        return
    with Checks(group, "all_gather"):
        check_gather(group, tensor, parts)
    flat = torch.empty(group.size * tensor.numel(), dtype=tensor.dtype, device="cpu")
    all_gather(group, tensor, flat)
    spread(flat, parts)


def reduce_list(
    group: Group,
    output: torch.Tensor,
    parts: Sequence[torch.Tensor],
    reduce: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    """Reduce parts[r] over all ranks into rank r's output; `reduce(chunk, flat)` does so for equal chunks.

    The parts are copied before anything is written, so the output may share memory with them. Raises TensorError unless
    this rank's own part is as long as its output.
    """
    with Checks(group, "reduce_scatter"):
        check_parts(group, parts, output.dtype, "reduce_scatter")
        check_output(group, output, "reduce_scatter")
        length = parts[group.rank].numel()
        if length != output.numel():
            raise TensorError(
                f"rank {group.rank}: reduce_scatter of an own part of {length} x {name_of(output.dtype)} into "
                f"{output.numel()}; make them equally long"
            )
    lengths = [part.numel() for part in parts]
    longest = max(lengths)
    if longest > min(lengths):  # padded, ranks that disagree would reduce what does not belong together
        known = torch.empty(group.size, group.size, dtype=torch.int64, device="cpu")
        all_gather(group, torch.tensor(lengths, device="cpu"), known)
        if any(other != lengths for other in known.tolist()):
            raise TensorError(f"reduce_scatter of parts of {known.tolist()} elements; give the same on all ranks")
    flat = torch.zeros(len(parts), longest, dtype=output.dtype, device="cpu")
    for row, part in zip(flat, parts, strict=True):
        row[: part.numel()] = part.detach().reshape(-1)
    chunk = torch.empty(longest, dtype=output.dtype, device="cpu")
    reduce(chunk, flat)
    output.detach().copy_(chunk[: output.numel()].view(output.shape))


def rows(group: Group, tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    """Return one slice of rows per rank: counts[r] rows for rank r, or equal parts where `counts` is empty.

    Raises TensorError unless there is a count for each rank and they add up to the rows of the tensor.
    """
    have = tensor.shape[0] if tensor.dim() else 0
    sizes = list(counts) or [have // group.size] * group.size
    if len(sizes) != group.size or sum(sizes) != have or min(sizes) < 0:
        raise TensorError(
            f"rank {group.rank}: all_to_all of a tensor of shape {tuple(tensor.shape)} in {sizes} rows; it needs a "
            f"number for each of {group.size} ranks, {have} together"
        )
    return list(torch.split(tensor.detach(), sizes))


def together(tensors: Sequence[torch.Tensor], action: Callable[[torch.Tensor], None]) -> None:
    """Apply an in-place `action` to tensors that share no memory; those of one dtype are passed as one flat tensor."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in alike])
        action(flat)
        spread(flat, alike)


def spread(flat: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Copy a flat tensor into `parts`, one after another; together they are as long."""
    for part, own in zip(parts, torch.split(flat, [part.numel() for part in parts]), strict=True):
        part.detach().copy_(own.view(part.shape))


def allreduce_sparse(group: Group, tensor: torch.Tensor, reduction: Reduction) -> None:
    """Sum a sparse COO tensor over all ranks, in place; every rank receives the elements of all others.

    Raises TensorError for other reductions and layouts.
    """
    with Checks(group, "all_reduce"):
        if reduction.op != "sum" or tensor.layout is not torch.sparse_coo:
            raise TensorError(f"rank {group.rank}: a {tensor.layout} tensor can only be summed, and only as sparse COO")
        reduction.check(group, tensor)
    with group.labelled(f" of {tuple(tensor.shape)}, sparse in {tensor.sparse_dim()} dimensions{reduction.label}"):
        source = reduction.before(tensor.detach(), copy=True).coalesce()
        counts = torch.empty(group.size, dtype=torch.int64, device="cpu")
        all_gather(group, torch.tensor([source._nnz()], device="cpu"), counts)
        lengths = counts.tolist()
        indices = [source.indices().new_empty(source.indices().shape[0], length) for length in lengths]
        values = [source.values().new_empty(length, *source.values().shape[1:]) for length in lengths]
        all_gather_v(group, source.indices(), indices)
        all_gather_v(group, source.values(), values)
    total = torch.sparse_coo_tensor(torch.cat(indices, 1), torch.cat(values), tensor.shape).coalesce()
    reduction.after(total, group.size)
    with torch.no_grad():
        tensor.copy_(total)  # into the tensor itself: a detached one would get indices of its own
