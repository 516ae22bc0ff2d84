"""Accelerators: the device of each rank, host memory that it copies from and to, and the streams that copy.

A device runs what is queued on its streams, each in order, some time after the call. The host waits for an event:

    compute    gradients of bucket 1 │ of bucket 2 │ ...            the program's stream
    outgoing                         └▶ copy 1 ─────│ copy 2 ...    behind an event of the program's stream
    host                                            └▶ sum 1        behind the end of the copy
    incoming                                               └▶ copy 1, update 1 ──▶ the program's stream waits for it

PyTorch's interface of accelerators is used for all of them (`torch.accelerator`, and the module `torch.cuda`,
`torch.xpu` ... of each). CUDA alone is named here, for the registration of host memory; `torch_backend` names it where
PyTorch's table of process groups does, and no other file.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch

from unisono.errors import TensorError, UsageError
from unisono.processor import AUTO, HOST

PIECE_BYTES = 4 << 20
"""Length in bytes of the pieces in which a tensor is copied, while others are exchanged."""


def choose_device(name: str, local_rank: int, local_ranks: int) -> torch.device:
    """Return the device of a rank, which is number `local_rank` of the `local_ranks` on its node.

    `name` is "auto", "cpu", a kind ("cuda"), of which ranks get one after another, or one device ("cuda:1"). Raises
    UsageError for a kind that is not there, and for a node with fewer devices than ranks.
    """
    present = torch.accelerator.current_accelerator(check_available=True)
    if name == HOST or (name == AUTO and present is None):
        return torch.device(HOST)
    try:
        wanted = present if present is not None and name == AUTO else torch.device(name)
    except RuntimeError as error:
        raise UsageError(f'device = "{name}" is no device of PyTorch\'s; take "auto", "cpu" or "cuda"') from error
    if present is None or present.type != wanted.type:
        available = "no accelerator" if present is None else f"{present.type} alone"
        raise UsageError(f'device = "{name}": PyTorch finds {available} here; take "auto", or "cpu"')
    count = torch.accelerator.device_count()
    index = local_rank if wanted.index is None else wanted.index
    if wanted.index is None and local_ranks > count:
        raise UsageError(
            f'device = "{name}": rank {local_rank} of this node\'s {local_ranks} has no accelerator, as the node has '
            f'{count}; start {count} on each node, share one by "{wanted.type}:0", or take "cpu"'
        )
    if index >= count:
        raise UsageError(f'device = "{name}": this node has {count}, numbered from 0')
    chosen = torch.device(wanted.type, index)
    if reason := _try(chosen):
        raise UsageError(
            f'device = "{name}": rank {local_rank} of this node cannot use {chosen}, which another process may hold: '
            f'{reason}; end that process, name another device, or take "cpu"'
        )
    return chosen


def _try(device: torch.device) -> str:
    """Allocate on a device; return why it cannot be, else an empty text."""
    try:
        torch.zeros(1, device=str(device))
    except RuntimeError as error:  # also torch.OutOfMemoryError
        return str(error).strip().splitlines()[0]
    return ""


def open_device(name: str, local_rank: int) -> None:
    """Allocate memory on the device that `choose_device` will return, before MPI is started: a CUDA-aware library looks
    for an open device then, and without one moves its memory by way of the host. Wrong names and devices that cannot be
    used are left to that."""
    present, (kind, _, digits) = torch.accelerator.current_accelerator(check_available=True), name.partition(":")
    if present is not None and kind in (AUTO, present.type):
        count = torch.accelerator.device_count()
        index = int(digits) if digits.isdigit() else local_rank % count
        if index < count:
            _try(torch.device(present.type, index))


def device_of(tensors: Sequence[torch.Tensor], what: str) -> torch.device:
    """Return the device of all these tensors, of which there is one at least. Raises TensorError for several."""
    devices = list(dict.fromkeys(tensor.device for tensor in tensors))
    if len(devices) > 1:
        raise TensorError(f"{what}: tensors on {devices[0]} and on {devices[1]}; move all to one device")
    return devices[0]


def is_on_host(tensor: torch.Tensor) -> bool:
    """Return True for a tensor in memory that the processor addresses; one of no device (meta) counts as such."""
    return tensor.is_cpu or tensor.is_meta


def check_not_captured(device: torch.device) -> None:
    """Raise UsageError while a device's work is captured as a graph, which could not hold what the ranks exchange."""
    if device.type != HOST and getattr(module_of(device), "is_current_stream_capturing", bool)():
        raise UsageError(
            "a graph cannot hold a step of several ranks, which exchange on the host: capture the forward pass alone "
            "(make_graphed_callables), before the model is made parallel"
        )


def module_of(device: torch.device) -> Any:
    """Return PyTorch's module of a kind of devices: `torch.cuda` for CUDA."""
    return torch.get_device_module(device)


def identity_of(device: torch.device) -> str:
    """Return what tells a device from the others of its node, whichever number a process has given it."""
    describe = getattr(module_of(device), "get_device_properties", lambda _: None)
    return str(getattr(describe(device), "uuid", device))


def memory_of(device: torch.device) -> float:
    """Return the bytes of a device's memory; 0 for the host, and where PyTorch does not tell."""
    describe = getattr(module_of(device), "get_device_properties", lambda _: None)
    return 0.0 if device.type == HOST else float(getattr(describe(device), "total_memory", 0))


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all that any thread has queued; the host, and no device (meta), have nothing."""
    if device.type not in (HOST, "meta"):
        module_of(device).synchronize(device)


def random_numbers_kept(device: torch.device) -> AbstractContextManager[None]:
    """Return a context after which random numbers of the host and of a device go on as before."""
    kind, numbers = ("cuda", []) if device.type == HOST else (device.type, [device.index or 0])
    return torch.random.fork_rng(numbers, device_type=kind)


def seed_random_numbers(device: torch.device, seed: int) -> None:
    """Seed the random numbers of the host and of a device; `torch.manual_seed` seeds all devices, and takes 0.3 ms and
    more: it formats the stack, for each kind of accelerator that has not begun."""
    torch.default_generator.manual_seed(seed)
    if device.type != HOST:
        with module_of(device).device(device):
            module_of(device).manual_seed(seed)


def host_memory(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return flat host memory, not set, that a device copies from and to beside other work."""
    if device.type != HOST and _allocates_pinned(device.type):
        return torch.empty(length, dtype=dtype, pin_memory=True, device="cpu")
    return pinned(torch.empty(length, dtype=dtype, device="cpu"), device)


@cache
def _allocates_pinned(kind: str) -> bool:
    """Return True where PyTorch allocates memory that this kind of device, the one in use, copies from and to."""
    present = torch.accelerator.current_accelerator()
    if present is None or present.type != kind:
        return False
    try:
        return torch.empty(1, device="cpu", pin_memory=True).is_pinned()
    except RuntimeError:  # it has no such allocator
        return False


def pinned(memory: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return host memory after registering it with a device, which can then copy beside other work.

    A device that cannot register memory copies it all the same, while the host waits.
    """
    module = module_of(device)
    if not memory.nbytes:
        return memory
    if device.type == "cuda":
        with torch.cuda.device(device):
            _cuda_runtime().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    elif hasattr(module, "register_host_memory"):
        module.register_host_memory(memory)
    return memory


def unpin(memory: torch.Tensor, device: torch.device) -> None:
    """Undo `pinned`, before the memory is freed."""
    if memory.nbytes and device.type == "cuda":
        _cuda_runtime().cudaHostUnregister(memory.data_ptr())


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class CopyStreams:
    """Streams of a device that copy to the host and from it, beside what the program computes."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._module = device, module_of(device)
        self._out, self._in = self._module.Stream(device), self._module.Stream(device)
        self._of_threads = threading.local()

    def record(self) -> Any:
        """Return an event of the calling thread's stream: the end of what it has queued so far."""
        event = self._module.Event()
        event.record(self._module.current_stream(self.device))
        return event

    def wait(self, event: Any) -> None:
        """Let the calling thread's stream wait for an event; None for none."""
        if event is not None:
            self._module.current_stream(self.device).wait_event(event)

    def outgoing(self, *events: Any) -> AbstractContextManager[Any]:
        """Return a context whose work is queued on the stream to the host, behind events."""
        return self._on(self._out, events)

    def incoming(self, *events: Any) -> AbstractContextManager[Any]:
        """Return a context whose work is queued on the stream from the host, behind events."""
        return self._on(self._in, events)

    def apart(self, *events: Any) -> AbstractContextManager[Any]:
        """Return a context whose work is queued on a stream of the calling thread's own, behind events."""
        if not hasattr(self._of_threads, "stream"):
            self._of_threads.stream = self._module.Stream(self.device)
        return self._on(self._of_threads.stream, events)

    @contextmanager
    def _on(self, stream: Any, events: Sequence[Any]) -> Iterator[Any]:
        with self._module.stream(stream), torch.no_grad():
            for event in events:
                self.wait(event)
            yield stream


@cache
def streams_of(device: torch.device) -> CopyStreams:
    """Return the streams that collectives of a device's tensors copy on."""
    return CopyStreams(device)


def computed_of(tensor: torch.Tensor) -> Any:
    """Return the event after which a tensor holds what the calling thread has computed; None on the host."""
    return None if is_on_host(tensor) else streams_of(tensor.device).record()


def copy_behind(target: torch.Tensor, source: torch.Tensor, computed: Any) -> None:
    """Copy a tensor once an event of its device has come, as a blocking copy; `computed` is None on the host."""
    if computed is None:
        target.copy_(source)
        return
    streams = streams_of(source.device if target.is_cpu else target.device)
    with streams.outgoing(computed) if target.is_cpu else streams.incoming(computed):
        target.copy_(source)


def pieces_of(length: int, itemsize: int) -> list[slice]:
    """Return slices of so many elements, of at most `PIECE_BYTES` each; none for no elements.

    >>> [(piece.start, piece.stop) for piece in pieces_of(3 << 20, 4)]
    [(0, 1048576), (1048576, 2097152), (2097152, 3145728)]
    """
    step = max(1, PIECE_BYTES // itemsize)
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]
