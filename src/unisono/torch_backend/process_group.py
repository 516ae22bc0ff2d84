"""Process group of torch.distributed over MPI: its lifetime, its messages, and the submission of its collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from unisono.collectives.staged import tensors_in
from unisono.errors import BackendError, UsageError
from unisono.torch_backend.buckets import SharedBucketReducer
from unisono.torch_backend.messages import Message, Messages
from unisono.torch_backend.mpi_job import mpi_job
from unisono.torch_backend.operations import CollectiveOperations, Tensors
from unisono.torch_backend.pytorch import GroupBase, bindings, distributed, leave_untraced
from unisono.torch_backend.register import DEVICES, NAME, Options
from unisono.torch_backend.work import NO_TIMEOUT, SubmissionQueue, Work, profiled


class ProcessGroup(CollectiveOperations):
    """Process group over MPI."""

    exchanged = False
    """True once an operation on tensors was called."""
    stands_in = False
    """True if the group answers as another backend's."""
    supports_coalescing = supports_splitting = supports_time_estimate = False
    """Abilities that PyTorch looks for in the backend of a device."""

    def __init__(self, creation: Any, options: Options | None) -> None:
        """Create the group, all its ranks together; `creation` holds PyTorch's parameters of it."""
        if not isinstance(options, Options | None):
            raise UsageError(f"pg_options = {options!r}; it is unisono.torch_backend.Options(...) or None")
        distributed.Reducer = SharedBucketReducer  # which DistributedDataParallel makes
        job, name = mpi_job(), creation.group_id
        super().__init__(job.group(name, job.members(creation)), options or Options())
        self._job, self._store = job, creation.store
        self._timeout: timedelta = creation.timeout
        self._name: str = name
        self._description = "undefined"
        self._answers = dict.fromkeys(DEVICES, NAME)  # name of the backend by device
        self._beside: dict[str, Any] = {}  # groups of other backends, by kind of device
        self._queue = SubmissionQueue(name, creation.group_rank, creation.group_size, self._group.calls)
        self._messages = Messages(self._group.comm.Dup(), self._queue, job.completions, job.world.watch)
        job.queues.add(self._queue)

    def stand_in(self, answers: Mapping[str, str]) -> None:
        """Answer as a group of other backends would: their names, by device."""
        self.stands_in, self._answers = True, dict(answers)

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch's name
        """Return the backend's true name to C++, which takes a group that says "gloo" for a ProcessGroupGloo."""
        return NAME

    def name(self) -> str:
        """Return the name of the backend, as Python asks for it."""
        return next(iter(self._answers.values()))

    _get_backend_name = name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in self._answers]

    def _get_backend(self, device: torch.device) -> ProcessGroup:
        """Return the backend that serves a device, this group. Raises RuntimeError, as PyTorch does, if none does."""
        if device.type not in self._answers:
            raise RuntimeError(f"group {self._name} has no backend for {device.type}, only for {[*self._answers]}")
        return self

    def getGroupName(self) -> str:  # noqa: N802
        """Return the name by which PyTorch finds the group again."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    # Point-to-point messages

    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> Work:
        if (beside := self.group_beside(tensors)) is not None:
            return beside.send(tensors, peer, tag)  # type: ignore[no-any-return]
        return _registered(self._messages.send(tensors[0].detach(), peer, tag, self._timeout.total_seconds()), tensors)

    def recv(self, tensors: Tensors, peer: int | None, tag: int = 0) -> Work:
        if (beside := self.group_beside(tensors)) is not None:
            work: Work = beside.recv_anysource(tensors, tag) if peer is None else beside.recv(tensors, peer, tag)
            return work
        message = self._messages.receive(tensors[0].detach(), peer, tag, self._timeout.total_seconds())
        return _registered(message, tensors)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        """Receive a tensor from any rank of the group; `source_rank()` of the returned work is that rank."""
        return self.recv(tensors, None, tag)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Run a barrier whose error names the ranks that have not reached it within `timeout`."""
        seconds = (self._timeout if timeout is None else timeout).total_seconds()
        self._messages.monitored_barrier(seconds, wait_all_ranks)

    # The group itself

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of operations submitted from now on."""
        self._timeout = timeout

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """End the group. Submitted operations are carried out; communicators are freed once all ranks call this."""
        if self._queue.ended:
            return
        self._queue.close()
        self._messages.close()
        self._job.release(self._group, self._messages, bool(self._queue.failure))
        self._queue.ended = f"rank {self.rank()}: group {self._queue.group} was destroyed"
        for beside in filter(None, self._beside.values()):
            beside.shutdown()

    def abort(self) -> None:
        """End the group at once: operations under way fail."""
        self._group.calls.fail(BackendError, f"rank {self.rank()}: group {self._queue.group} was aborted")
        for beside in filter(None, self._beside.values()):
            beside.abort()
        self._beside.clear()
        self.shutdown()

    # Tensors of a device, where the group was asked for as "cpu:unisono,cuda:nccl"

    def group_beside(self, tensors: Tensors) -> Any:
        """Return NCCL's group, if that was asked for to serve these tensors; None for this group.

        PyTorch creates only one group for a backend that is written in Python. So this group creates NCCL's at the
        first operation on a CUDA tensor, which is the same on all ranks. Raises BackendError for another backend.
        """
        self.exchanged = True
        if not tensors or tensors[0].is_cpu or self.stands_in or self._queue.ended:
            return None
        kind = tensors[0].device.type
        if kind not in self._beside:
            asked = dict(part.split(":") for part in dist.get_backend_config(self).split(",") if ":" in part)
            name = asked.get(kind, NAME)
            if name not in (NAME, "nccl"):
                raise BackendError(f"tensors on {kind} by {name!r} beside unisono; only nccl is known there")
            self._beside[kind] = self._create_nccl() if name == "nccl" else None
        return self._beside[kind]

    def _create_nccl(self) -> Any:
        beside, options = GroupBase(self._store, self.rank(), self.size()), dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        nccl = dist.ProcessGroupNCCL(self._store, self.rank(), self.size(), options)
        beside._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)
        beside._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
        return beside

    def submit(self, name: str, action: Callable[[], object], inputs: Tensors, outputs: Any, opts: Any) -> Work:
        """Submit a collective after those before it; it runs at once if it is blocking and nothing is under way."""
        timeout = opts.timeout if opts is not None and opts.timeout > NO_TIMEOUT else self._timeout
        work = Work(name, outputs, timeout.total_seconds(), self._job.completions, profiled(name, inputs))
        if inputs and not inputs[0].is_cpu:
            action = work.behind_stream(action, [*inputs, *tensors_in(outputs)])
        blocking = opts is not None and not opts.asyncOp
        if not blocking:
            _registered(work, tensors_in(outputs))
        return self._queue.submit(action, work, blocking)


def _registered(work: Work, tensors: Iterable[torch.Tensor]) -> Work:
    """Return work that `wait_tensor` of its tensors waits for, where PyTorch asks for that."""
    if bindings._allow_inflight_collective_as_graph_input():
        for tensor in tensors:  # C++ would not keep `work` itself
            bindings._register_work(tensor, bindings.PythonCallbackWork(work.wait))
    return work


leave_untraced(CollectiveOperations, ProcessGroup, Work, Message, SharedBucketReducer)
