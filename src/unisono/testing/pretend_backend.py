"""Backend of torch.distributed for the device `pretend`, as NCCL is CUDA's: for tests of code that sums by one.

`use_pretend_backend()` registers it in PyTorch's table of backends. Its sums run late, on a stream of its own, behind
what the calling thread's stream has got; `wait` lets the thread's stream wait for them, and the host goes on:

    the thread's stream   ─ computes ─┐                              ┌─ reads the sum
    the backend's stream              └ to the host │ gloo │ back ───┘

Ranks that call in another order than others wait for ever, as with NCCL.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property, reduce
from typing import Any

import torch
import torch.distributed as dist

from unisono.testing import pretend_device
from unisono.testing.late import Queue
from unisono.testing.pretend_device import LATE, NAME, PretendEvent, Stream, current_stream
from unisono.torch_backend.pytorch import GroupBase, WorkBase

BACKEND = "pretend_sums"

_OPS: dict[Any, Callable[..., torch.Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
}

Parts = list[torch.Tensor]


def use_pretend_backend() -> None:
    """Register the backend, if that has not been done, for process groups with tensors on `pretend`."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, PretendBackend, devices=[NAME])
    dist.Backend.default_device_backend_map[NAME] = BACKEND


class PretendWork(WorkBase):  # type: ignore[misc]  # untyped
    """Work of the backend, which has ended once its stream has passed an event."""

    def __init__(self, event: PretendEvent, *kept: torch.Tensor) -> None:
        super().__init__()
        self._event, self._kept = event, kept

    def is_completed(self) -> bool:
        """Return whether the work has ended; some works of any stream may run now."""
        return self._event.query()

    def wait(self, _: timedelta = timedelta()) -> bool:
        """Let the calling thread's stream wait for the work."""
        self._event.wait(current_stream(self._kept[0].device.index))
        return True


class PretendBackend(GroupBase):  # type: ignore[misc]
    """Sums of tensors of several processes, each on its own device `pretend`."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, size)
        self._store, self._rank, self._timeout, self._streams = store, rank, timeout, dict[int, Stream]()
        self._ended = False

    @cached_property
    def _gloo(self) -> Any:
        """The transport, which connects the ranks at their first sum."""
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices, options._timeout = [gloo.create_device(hostname="127.0.0.1")], self._timeout
        return gloo(self._store, self._rank, self.size(), options)

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch's name
        return BACKEND

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> PretendWork:
        return self._begin(tensors[0], tensors[0], lambda parts: reduce(_OPS[opts.reduceOp.op], parts))

    def reduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> PretendWork:
        if self._rank == opts.rootRank:
            return self.allreduce(tensors, opts)
        return self._begin(tensors[0], tensors[0], lambda parts: parts[self._rank])

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any) -> PretendWork:
        return self._begin(tensors[0], tensors[0], lambda parts: parts[opts.rootRank])

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> PretendWork:
        """Reduce a tensor over all ranks; rank r receives the r-th of its equal parts."""

        def own(parts: Parts) -> torch.Tensor:
            return reduce(_OPS[opts.reduceOp.op], parts).view(len(parts), -1)[self._rank]

        return self._begin(tensor, output, own)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> PretendWork:  # noqa: ARG002
        return self._begin(tensor, output, torch.cat)

    def _begin(
        self, tensor: torch.Tensor, output: torch.Tensor, combine: Callable[[Parts], torch.Tensor]
    ) -> PretendWork:
        index, size = tensor.device.index, self.size()
        stream = self._streams.setdefault(index, Stream(index))
        stream.wait_stream(current_stream(index))
        sent = torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=True)
        came = torch.empty(output.numel(), dtype=output.dtype, pin_memory=True)
        parts = [torch.empty(tensor.numel(), dtype=tensor.dtype) for _ in range(size)]
        network, begun = Queue(index), list[Any]()

        def end() -> None:
            """Run again and again, as a question does not wait for the other ranks."""
            if self._ended:
                return
            if begun and begun[0].is_completed():
                begun[0].wait()  # raises what has failed
                came.copy_(combine(parts))
                return
            time.sleep(1e-4)
            if network.works:
                network.works.appendleft(end)
            else:
                LATE.put(network, end)

        event = PretendEvent()
        with pretend_device.stream(stream), torch.no_grad():
            sent.copy_(tensor.detach().reshape(-1), non_blocking=True)
            LATE.put(stream.queue, lambda: begun.append(self._gloo.allgather([parts], [sent])))
            LATE.put(network, end)
            LATE.put(stream.queue, LATE.point(network))
            output.detach().view(-1).copy_(came, non_blocking=True)
            event.record(stream)
        return PretendWork(event, tensor, output)

    def abort(self) -> None:
        self._ended = True
        if "_gloo" in vars(self):
            self._gloo.abort()

    def shutdown(self) -> None:
        if "_gloo" in vars(self):
            self._gloo.shutdown()
