"""PyTorch's collectives, each mapped to one of Unisono's.

PyTorch knows an operation by several names: those of its C++ side, of Python's `dist`, and of earlier releases. Each
operation is defined once here; the other names are aliases. Its method carries it out; a call of it submits that.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from datetime import timedelta
from functools import partial, wraps
from typing import Any

import torch

from unisono.collectives.all_gather import all_gather
from unisono.collectives.all_to_all import all_to_all, all_to_all_v, gather, scatter
from unisono.collectives.allreduce import allreduce, device_transports
from unisono.collectives.checks import Checks, check_memory, check_output
from unisono.collectives.direct import all_gather_direct, broadcast_direct, is_direct, reduce_scatter_direct
from unisono.collectives.group import Group
from unisono.collectives.payload import is_plain
from unisono.collectives.reduce import broadcast, reduce
from unisono.collectives.reduce_scatter import reduce_scatter
from unisono.collectives.staged import call_with_copies, is_on_device, refuse_shared, tensors_in
from unisono.errors import PlaceMismatchError, TensorError
from unisono.torch_backend.arguments import (
    Reduction,
    allreduce_sparse,
    gather_list,
    in_lists,
    reduce_list,
    reduction_of,
    rows,
    together,
)
from unisono.torch_backend.pytorch import GroupBase, ReduceOp, c10d
from unisono.torch_backend.register import Options
from unisono.torch_backend.work import Work
from unisono.wires import EXACT

Tensors = list[torch.Tensor]


def collective(name: str) -> Callable[[Callable[..., None]], Callable[..., Work]]:
    """Return a decorator for a method that carries an operation out: a call of it submits that, as `name` in messages.
    The first argument is what the operation fills, the second one its inputs, where they are others."""

    def decorate(method: Callable[..., None]) -> Callable[..., Work]:
        @wraps(method)
        def submit(group: CollectiveOperations, *arguments: Any, **named: Any) -> Work:
            (filled, *others), named = in_lists(method.__name__, arguments, named)
            inputs = tensors_in(others[0] if others else None) or tensors_in(filled)
            if (beside := group.group_beside(inputs)) is not None:
                return getattr(beside, method.__name__)(filled, *others, **named)  # type: ignore[no-any-return]
            opts = named.get("opts", others[-1] if others else None)
            outputs = filled if isinstance(filled, list) else [filled]
            action = partial(method, group, filled, *others, **named)
            return group.submit(name, action, inputs, outputs, opts if hasattr(opts, "asyncOp") else None)

        return submit

    return decorate


def by_copies(method: Callable[..., None]) -> Callable[..., None]:
    """Return a method that gets copies on the host of a device's tensors, and has them copied back."""

    @wraps(method)
    def carry_out(group: CollectiveOperations, filled: Any, *others: Any, **named: Any) -> None:
        action, written = partial(method, group, **named), tensors_in(filled)
        if is_on_device(*tensors_in([filled, *others])):
            with Checks(group._group, method.__name__):
                refuse_shared(method.__name__, written)
            call_with_copies(action, (filled, *others), written)
        else:
            action(filled, *others)

    return carry_out


class CollectiveOperations(GroupBase):  # type: ignore[misc]  # untyped
    """Collectives of a process group with the ranks of `group`; `submit` has them carried out."""

    def __init__(self, group: Group, options: Options) -> None:
        super().__init__(group.rank, group.size)
        self.options = options
        self._group = group

    @abstractmethod
    def group_beside(self, tensors: Tensors) -> Any:
        """Return the group of another backend that serves the device of these tensors; None for this group."""

    @abstractmethod
    def submit(self, name: str, action: Callable[[], object], inputs: Tensors, outputs: Any, opts: Any) -> Work:
        """Carry `action` out after the operations submitted before, and return its work."""

    # Reduce and broadcast

    @collective("all_reduce")
    def allreduce(self, tensors: Tensors, opts: Any = None) -> None:
        """Reduce a tensor over all ranks, in place; all ranks receive the result."""
        (tensor,) = tensors
        if tensor.is_sparse:
            allreduce_sparse(self._group, tensor, _reduction(opts))
        else:
            self._reduce_all(tensor, _reduction(opts))

    @collective("all_reduce_coalesced")
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> None:
        """Reduce several tensors over all ranks, in place; those of one dtype are exchanged as one."""
        reduction = _reduction(opts)
        with Checks(self._group, "allreduce_coalesced"):
            check_memory(self._group, "allreduce_coalesced", tensors)
            for tensor in tensors:
                reduction.check(self._group, tensor)
        with self._group.labelled(f" of tensors of {[tensor.numel() for tensor in tensors]} elements"):
            together(tensors, partial(self._reduce_all, reduction=reduction))

    @collective("broadcast")
    def broadcast(self, tensors: Tensors, opts: Any = None) -> None:
        """Copy the root's tensor to all ranks, in place."""
        (tensor,) = tensors
        (broadcast_direct if self._is_direct(tensor) else broadcast)(self._group, tensor, _root(opts))

    @collective("reduce")
    def reduce(self, tensors: Tensors, opts: Any = None) -> None:
        """Reduce a tensor over all ranks into the root's, in place."""
        reduction, root, tensor = _reduction(opts), _root(opts), tensors[0].detach()
        with Checks(self._group, "reduce"):
            reduction.check(self._group, tensor)
        source = reduction.before(tensor, copy=True)
        with self._group.labelled(reduction.label):
            if self.options.wire == EXACT:
                source = allreduce(self._group, source.clone(), "auto", EXACT, reduction.op)
            else:
                reduce(self._group, source, root, reduction.op)
        if self._group.rank == root:
            reduction.after(source, self._group.size)
            if source is not tensor:
                tensor.copy_(source)

    def _reduce_all(self, tensor: torch.Tensor, reduction: Reduction) -> None:
        tensor = tensor.detach()
        if not reduction.label:
            self._exchange(tensor, reduction)
            return
        with self._group.labelled(reduction.label):
            with Checks(self._group, "all_reduce"):
                check_output(self._group, tensor, "all_reduce")
                reduction.check(self._group, tensor)
            reduction.before(tensor, copy=False)
            self._exchange(tensor, reduction)
        reduction.after(tensor, self._group.size)

    def _exchange(self, tensor: torch.Tensor, reduction: Reduction) -> None:
        wire = self._wire(tensor, reduction)
        try:
            allreduce(self._group, tensor, "auto", wire, reduction.op)
        except PlaceMismatchError:  # raised on all ranks: one has joined early, and gives zeros instead of its bucket
            tensor.copy_(allreduce(self._group, tensor.clone(), "auto", wire, reduction.op))

    def _is_direct(self, *tensors: torch.Tensor) -> bool:
        """Return True where the MPI library moves the memory of a device, in which these tensors lie."""
        if self.options.wire is not None or not is_on_device(*tensors):
            return False
        return device_transports(self._group, tensors[0].device).moves and all(map(is_plain, tensors))

    # Memory of tensors

    def supports_tensor_alloc(self, device: torch.device) -> bool:  # noqa: ARG002
        """Return False: FSDP2 would allocate for each operation; those that it uses gain nothing by shared memory."""
        return False

    def empty(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat, zeroed tensor that an all_reduce need not copy; called by all ranks together."""
        made: list[torch.Tensor] = []
        self.submit("empty", lambda: made.append(self._group.empty(length, dtype)), [], made, None).wait()
        return made[0]

    # Gather the tensors of all ranks

    @collective("all_gather")
    @by_copies
    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> None:  # noqa: ARG002
        """Gather every rank's tensor on all ranks; sizes may differ between ranks."""
        for parts, tensor in zip(outputs, inputs, strict=True):
            gather_list(self._group, parts, tensor)

    @collective("all_gather_coalesced")
    @by_copies
    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> None:  # noqa: ARG002
        """Gather several tensors of every rank; outputs[r] receives those of rank r, in the order of `inputs`."""
        with Checks(self._group, "all_gather_coalesced"):
            own_outputs = range(self._group.rank * len(inputs), (self._group.rank + 1) * len(inputs))
            pairs = list(zip(own_outputs, range(len(inputs)), strict=True))
            check_memory(self._group, "all_gather_coalesced", tensors_in(outputs), inputs, pairs)
        for index, tensor in enumerate(inputs):
            gather_list(self._group, [parts[index] for parts in outputs], tensor)

    @collective("all_gather_into_tensor")
    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> None:  # noqa: ARG002
        """Gather every rank's tensor on all ranks, side by side in one tensor."""
        (all_gather_direct if self._is_direct(tensor, output) else all_gather)(self._group, tensor, output)

    @collective("all_gather_into_tensor_coalesced")
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> None:  # noqa: ARG002
        self._check_apart("all_gather_into_tensor_coalesced", outputs, inputs)
        for output, tensor in zip(outputs, inputs, strict=True):
            all_gather(self._group, tensor, output)

    @collective("gather")
    @by_copies
    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> None:
        """Gather every rank's tensor on the root."""
        gather(self._group, inputs[0], outputs[0] if outputs else None, _root(opts))

    # Scatter, and exchange parts

    @collective("scatter")
    @by_copies
    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> None:
        """Scatter the root's parts: each rank receives its own."""
        scatter(self._group, outputs[0], inputs[0] if inputs else None, _root(opts))

    @collective("reduce_scatter")
    @by_copies
    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> None:
        """Reduce every rank's parts over all ranks: rank r receives part r. Sizes may differ between ranks."""
        for output, parts in zip(outputs, inputs, strict=True):
            reduce_list(self._group, output, parts, partial(self._reduce_part, reduction=_reduction(opts)))

    @collective("reduce_scatter_tensor")
    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> None:
        """Do the same as `reduce_scatter`, with the parts side by side in one tensor."""
        self._reduce_part(output, tensor, _reduction(opts))

    @collective("reduce_scatter_tensor_coalesced")
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> None:
        self._check_apart("reduce_scatter_tensor_coalesced", outputs, inputs)
        for output, tensor in zip(outputs, inputs, strict=True):
            self._reduce_part(output, tensor, _reduction(opts))

    def _check_apart(self, name: str, outputs: Tensors, inputs: Tensors) -> None:
        """Raise TensorError where tensors share memory; only an output and its own input may."""
        with Checks(self._group, name):
            pairs = [(place, place) for place in range(len(outputs))]
            check_memory(self._group, name, outputs, inputs, pairs, lambda *_: True)  # each pair is looked at later

    def _reduce_part(self, output: torch.Tensor, tensor: torch.Tensor, reduction: Reduction) -> None:
        source, out = tensor.detach(), output.detach()
        if not reduction.label:
            self._exchange_parts(out, source, reduction)
            return
        with self._group.labelled(reduction.label):
            with Checks(self._group, "reduce_scatter"):
                reduction.check(self._group, source)
            self._exchange_parts(out, reduction.before(source, copy=True), reduction)
        reduction.after(out, self._group.size)

    def _exchange_parts(self, out: torch.Tensor, source: torch.Tensor, reduction: Reduction) -> None:
        if self._is_direct(source, out) and is_direct(self._group, source, reduction.op, None):
            reduce_scatter_direct(self._group, source, out, reduction.op)
        else:
            reduce_scatter(self._group, source, "auto", self._wire(source, reduction), reduction.op, out)

    @collective("all_to_all")
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> None:  # noqa: ARG002
        """Send inputs[d] to rank d, and receive outputs[s] from rank s; sizes may differ."""
        all_to_all_v(self._group, inputs, outputs)

    @collective("all_to_all")
    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,  # noqa: ARG002
    ) -> None:
        """Exchange rows of one tensor: input_split_sizes[d] rows to rank d, output_split_sizes[s] from rank s; equal
        parts if both are empty."""
        if not output_split_sizes and not input_split_sizes:
            with Checks(self._group, "all_to_all"):
                for each in (tensor, output):
                    if each.dim() and each.shape[0] % self._group.size:
                        raise TensorError(
                            f"rank {self._group.rank}: all_to_all of {tuple(each.shape)}: {self._group.size} ranks do "
                            "not divide its rows: give split sizes"
                        )
            all_to_all(self._group, tensor, "auto", output)
            return
        with Checks(self._group, "all_to_all"):
            check_memory(self._group, "all_to_all", [output], [tensor])
            sends = rows(self._group, tensor, input_split_sizes)
            receives = rows(self._group, output, output_split_sizes)
        all_to_all_v(self._group, sends, receives)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Submit a barrier: no rank passes it before the last has reached it."""
        timeout = opts if isinstance(opts, timedelta) else timeout
        if timeout is not None:
            opts = c10d.BarrierOptions()
            opts.timeout = timeout
        return self.submit("barrier", self._group.barrier, [], [], opts)

    def _wire(self, tensor: torch.Tensor, reduction: Reduction) -> str | None:
        """Return the number format in which a tensor is sent between nodes; None for its own."""
        if self.options.wire == EXACT:
            return EXACT  # of all tensors: it is no conversion
        fit = tensor.dtype in (torch.float32, torch.float64) and tensor.nbytes >= self.options.wire_from
        return self.options.wire if fit and reduction.op == "sum" else None

    # Other names of the same: of PyTorch's C++ side, and of earlier releases
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _reduction(opts: Any) -> Reduction:
    return reduction_of(opts.reduceOp if opts else ReduceOp.SUM)


def _root(opts: Any) -> int:
    return int(opts.rootRank) if opts else 0
