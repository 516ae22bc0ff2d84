"""PyTorch's collectives, each mapped to one of Unisono's.

PyTorch knows an operation by several names: those of its C++ side, of Python's `dist`, and of earlier releases. Each
operation is defined once here; the other names are aliases.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from unisono.collectives.all_gather import all_gather
from unisono.collectives.all_to_all import all_to_all
from unisono.collectives.all_to_all_v import all_to_all_v, gather, scatter
from unisono.collectives.allreduce import allreduce
from unisono.collectives.broadcast import broadcast
from unisono.collectives.checks import Checks, check_memory, check_output
from unisono.collectives.direct import all_gather_direct, allreduce_direct, broadcast_direct, reduce_scatter_direct
from unisono.collectives.group import Group
from unisono.collectives.reduce import reduce
from unisono.collectives.reduce_scatter import reduce_scatter
from unisono.errors import PlaceMismatchError
from unisono.torch_backend.arguments import (
    Reduction,
    allreduce_sparse,
    gather_list,
    reduce_list,
    reduction_of,
    rows,
    together,
)
from unisono.torch_backend.devices import on_any_device
from unisono.torch_backend.pytorch import GroupBase, ReduceOp
from unisono.torch_backend.register import Options
from unisono.torch_backend.work import Work

Tensors = list[torch.Tensor]


class CollectiveOperations(GroupBase):  # type: ignore[misc]  # untyped
    """Collectives of a process group with the ranks of `group`; `submit` has them carried out."""

    def __init__(self, group: Group, options: Options) -> None:
        super().__init__(group.rank, group.size)
        self.options = options
        self._group = group

    @abstractmethod
    def submit(self, name: str, action: Callable[[], object], inputs: list[Any], outputs: Any, opts: Any) -> Work:
        """Carry `action` out after the operations submitted before, and return its work."""

    # Reduce and broadcast

    @on_any_device
    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        """Reduce a tensor over all ranks, in place; all ranks receive the result."""
        reduction = _reduction(opts)
        (tensor,) = tensors
        carry = self._reduce_sparse if tensor.is_sparse else self._reduce_all
        return self.submit("all_reduce", lambda: carry(tensor, reduction), tensors, tensors, opts)

    @on_any_device
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        """Reduce several tensors over all ranks, in place; those of one dtype are exchanged as one."""
        reduction = _reduction(opts)

        def each() -> None:
            with Checks(self._group, "allreduce_coalesced"):
                check_memory(self._group, "allreduce_coalesced", tensors)
            together(tensors, lambda flat: self._reduce_all(flat, reduction))

        return self.submit("all_reduce_coalesced", each, tensors, tensors, opts)

    @on_any_device
    def broadcast(self, tensors: Tensors, opts: Any = None) -> Work:
        """Copy the root's tensor to all ranks, in place."""
        (tensor,), root = tensors, opts.rootRank if opts else 0
        carry = broadcast if tensor.is_cpu else broadcast_direct
        return self.submit("broadcast", lambda: carry(self._group, tensor, root), tensors, tensors, opts)

    @on_any_device
    def reduce(self, tensors: Tensors, opts: Any = None) -> Work:
        """Reduce a tensor over all ranks into the root's, in place."""
        reduction, root = _reduction(opts), opts.rootRank if opts else 0
        (tensor,) = tensors

        def to_root() -> None:
            own = tensor.detach()
            source = reduction.before(own, copy=True)
            reduce(self._group, source, root, reduction.op)
            if self._group.rank == root:
                reduction.after(source, self._group.size)
                if source is not own:
                    own.copy_(source)

        return self.submit("reduce", to_root, tensors, tensors, opts)

    def _reduce_all(self, tensor: torch.Tensor, reduction: Reduction) -> None:
        tensor = tensor.detach()
        if reduction.factor is not None:
            with Checks(self._group, "all_reduce"):
                check_output(self._group, tensor, "all_reduce")
            reduction.before(tensor, copy=False)
        wire = self._wire(tensor, reduction)
        try:
            if tensor.is_cpu:
                allreduce(self._group, tensor, "auto", wire, reduction.op)
            else:
                allreduce_direct(self._group, tensor, reduction.op)
        except PlaceMismatchError:  # raised on all ranks: one has joined early, and gives zeros instead of its bucket
            tensor.copy_(allreduce(self._group, tensor.clone(), "auto", wire, reduction.op))
        reduction.after(tensor, self._group.size)

    def _reduce_sparse(self, tensor: torch.Tensor, reduction: Reduction) -> None:
        allreduce_sparse(self._group, tensor, reduction)

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

    @on_any_device
    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        """Gather every rank's tensor on all ranks; sizes may differ between ranks."""

        def each() -> None:
            for parts, tensor in zip(outputs, inputs, strict=True):
                gather_list(self._group, parts, tensor)

        return self.submit("all_gather", each, inputs, outputs, opts)

    @on_any_device
    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        """Gather several tensors of every rank; outputs[r] receives those of rank r, in the order of `inputs`."""

        def each() -> None:
            with Checks(self._group, "all_gather_coalesced"):
                own = range(self._group.rank * len(inputs), (self._group.rank + 1) * len(inputs))
                flat = [part for parts in outputs for part in parts]
                pairs = list(zip(own, range(len(inputs)), strict=True))
                check_memory(self._group, "all_gather_coalesced", flat, inputs, pairs)
            for number, tensor in enumerate(inputs):
                gather_list(self._group, [parts[number] for parts in outputs], tensor)

        return self.submit("all_gather_coalesced", each, inputs, outputs, opts)

    @on_any_device
    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        """Gather every rank's tensor on all ranks, side by side in one tensor."""
        carry = all_gather if tensor.is_cpu else all_gather_direct
        return self.submit(
            "all_gather_into_tensor", lambda: carry(self._group, tensor, output), [tensor], [output], opts
        )

    @on_any_device
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Gather several tensors, each as by `all_gather_single`."""

        def each() -> None:
            self._check_apart("all_gather_into_tensor_coalesced", outputs, inputs)
            for output, tensor in zip(outputs, inputs, strict=True):
                all_gather(self._group, tensor, output)

        return self.submit("all_gather_into_tensor_coalesced", each, inputs, outputs, opts)

    @on_any_device
    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        """Gather every rank's tensor on the root."""
        (tensor,), root = inputs, opts.rootRank if opts else 0
        parts = outputs[0] if outputs else None
        return self.submit("gather", lambda: gather(self._group, tensor, parts, root), inputs, outputs, opts)

    # Scatter, and exchange parts

    @on_any_device
    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> Work:
        """Scatter the root's parts: each rank receives its own."""
        (output,), root = outputs, opts.rootRank if opts else 0
        parts = inputs[0] if inputs else None
        return self.submit("scatter", lambda: scatter(self._group, output, parts, root), inputs, outputs, opts)

    @on_any_device
    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> Work:
        """Reduce every rank's parts over all ranks: rank r receives part r. Sizes may differ between ranks."""
        reduction = _reduction(opts)

        def each() -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                reduce_list(self._group, output, parts, lambda chunk, flat: self._reduce_part(chunk, flat, reduction))

        return self.submit("reduce_scatter", each, inputs, outputs, opts)

    @on_any_device
    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        """Do the same as `reduce_scatter`, with the parts side by side in one tensor."""
        reduction = _reduction(opts)
        return self.submit(
            "reduce_scatter_tensor", lambda: self._reduce_part(output, tensor, reduction), [tensor], [output], opts
        )

    @on_any_device
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Reduce and scatter several tensors, each as by `reduce_scatter_single`."""
        reduction = _reduction(opts)

        def each() -> None:
            self._check_apart("reduce_scatter_tensor_coalesced", outputs, inputs)
            for output, tensor in zip(outputs, inputs, strict=True):
                self._reduce_part(output, tensor, reduction)

        return self.submit("reduce_scatter_tensor_coalesced", each, inputs, outputs, opts)

    def _check_apart(self, name: str, outputs: Tensors, inputs: Tensors) -> None:
        """Raise TensorError where tensors share memory; only an output and its own input may."""
        with Checks(self._group, name):
            pairs = [(place, place) for place in range(len(outputs))]
            check_memory(self._group, name, outputs, inputs, pairs, lambda *_: True)  # each pair is looked at later

    def _reduce_part(self, output: torch.Tensor, tensor: torch.Tensor, reduction: Reduction) -> None:
        source, out = reduction.before(tensor.detach(), copy=True), output.detach()
        if tensor.is_cpu:
            reduce_scatter(self._group, source, "auto", self._wire(source, reduction), reduction.op, out)
        else:
            reduce_scatter_direct(self._group, source, out, reduction.op)
        reduction.after(out, self._group.size)

    @on_any_device
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Send inputs[d] to rank d, and receive outputs[s] from rank s; sizes may differ."""
        return self.submit("all_to_all", lambda: all_to_all_v(self._group, inputs, outputs), inputs, outputs, opts)

    @on_any_device
    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
    ) -> Work:
        """Exchange rows of one tensor: input_split_sizes[d] rows to rank d, output_split_sizes[s] from rank s.

        Equal parts if both are empty.
        """

        def exchange_rows() -> None:
            if output_split_sizes or input_split_sizes:
                with Checks(self._group, "all_to_all"):
                    check_memory(self._group, "all_to_all", [output], [tensor])
                    sends, receives = (
                        rows(self._group, tensor, input_split_sizes),
                        rows(self._group, output, output_split_sizes),
                    )
                all_to_all_v(self._group, sends, receives)
            else:
                all_to_all(self._group, tensor, "auto", output)

        return self.submit("all_to_all", exchange_rows, [tensor], [output], opts)

    def barrier(self, opts: Any = None) -> Work:
        """Submit a barrier: no rank passes it before the last has reached it."""
        return self.submit("barrier", self._group.barrier, [], [], opts)

    def _wire(self, tensor: torch.Tensor, reduction: Reduction) -> str | None:
        """Return the number format in which a tensor is sent between nodes; None for its own."""
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
