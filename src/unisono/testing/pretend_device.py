"""The device module of `pretend`, as torch.cuda is CUDA's: streams and events, what is current in a thread, and the
device guard, through which PyTorch's C++ asks for devices."""

from __future__ import annotations

import ctypes
import os
import re
import threading
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch.autograd import Variable
from torch.utils.backend_registration import _DummyDeviceGuard

from unisono.testing.late import Late, Point, Queue

NAME = "pretend"
KIND: Any = torch._C._autograd.DeviceType.PrivateUse1
LATE = Late()
POISON = 255
"""Byte that new and overwritten memory is full of: NaN in floating-point numbers."""
GENERATORS = [torch.Generator()]
"""A generator of random numbers for each device; once the devices are registered, there are so many."""

_stream_ids = count(1)
_streams: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()
_defaults: dict[int, Stream] = {}
_calls: dict[int, _BackwardCall] = {}
_NO_SEQUENCE_NR = 2**64 - 1  # sequence number of nodes that accumulate gradients


class _Here(threading.local):
    """Current device and streams of a thread; from which sequence number of nodes on it has had which streams."""

    def __init__(self) -> None:
        self.device, self.node = 0, (-1, -1)
        self.streams: dict[int, Stream] = {}
        self.changes: list[tuple[int, dict[int, Stream]]] = []


HERE = _Here()


def index_of(device: Any = None) -> int:
    """Return the index of a device (None or without an index: the current one)."""
    index = device if isinstance(device, int | None) else torch.device(device).index
    if index is None:
        return HERE.device
    if not 0 <= index < device_count():
        raise RuntimeError(f"{NAME}:{index} does not exist: there are {device_count()} devices")
    return index


class Stream(torch.Stream):
    """Queue of operations of a device, which run late. Any priority counts as 0."""

    queue: Queue

    def __new__(cls, device: Any = None, priority: int = 0) -> Stream:  # noqa: ARG004
        stream_id, index = next(_stream_ids), index_of(device)
        stream: Stream = super().__new__(cls, stream_id=stream_id, device_index=index, device_type=int(KIND))
        stream.queue = Queue(index)
        _streams[stream_id] = stream
        return stream

    def record_event(self, event: Any = None) -> Any:
        event = event or PretendEvent()
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        LATE.put(self.queue, LATE.point(stream.queue))

    def query(self) -> bool:
        return LATE.ask(LATE.point(self.queue))

    def synchronize(self) -> None:
        LATE.run_to(LATE.point(self.queue))


class PretendEvent:
    """Point of a stream, which other streams and the host wait for."""

    def __init__(self, enable_timing: bool = False, **_: bool) -> None:
        self.enable_timing = enable_timing
        self._point: Point | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._point = LATE.point((stream or current_stream()).queue)

    def wait(self, stream: Stream | None = None) -> None:
        if self._point is not None:
            LATE.put((stream or current_stream()).queue, self._point)

    def query(self) -> bool:
        return self._point is None or LATE.ask(self._point)

    def synchronize(self) -> None:
        if self._point is not None:
            LATE.run_to(self._point)

    def elapsed_time(self, end: PretendEvent) -> float:
        """Return the milliseconds from this event to `end`; both must have happened."""
        if not (self.enable_timing and end.enable_timing):
            raise ValueError("both events need enable_timing=True")
        seconds = [event._point.seconds if event._point else None for event in (self, end)]
        if seconds[0] is None or seconds[1] is None:
            raise RuntimeError("both events must be recorded and have happened: synchronize with them first")
        return (seconds[1] - seconds[0]) * 1000


Event = PretendEvent


def default_stream(device: Any = None) -> Stream:
    """Return the stream of a device that is current until another one is set."""
    index = index_of(device)
    return _defaults.get(index) or _defaults.setdefault(index, Stream(index))


def current_stream(device: Any = None) -> Stream:
    """Return this thread's stream of a device: in a backward pass that of the forward pass."""
    _enter_node()
    index = index_of(device)
    return HERE.streams.get(index) or default_stream(index)


def set_stream(stream: Stream) -> None:
    """Make a stream the current one of its device in this thread."""
    _enter_node()
    HERE.streams = {**HERE.streams, stream.device_index: stream}
    HERE.changes.append((torch._C._autograd._get_sequence_nr(), HERE.streams))


@contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """Context with another current stream (None: with the same) and with its device."""
    if stream is None:
        yield
        return
    before = current_stream(stream.device_index)
    with device(stream.device_index):
        set_stream(stream)
        try:
            yield
        finally:
            set_stream(before)


@contextmanager
def device(device: Any) -> Iterator[None]:
    """Context with another current device."""
    before, HERE.device = HERE.device, index_of(device)
    try:
        yield
    finally:
        HERE.device = before


def set_device(device: Any) -> None:
    HERE.device = index_of(device)


def current_device() -> int:
    return HERE.device


def synchronize(device: Any = None) -> None:
    """Run everything that has been queued on a device."""
    LATE.run_device(index_of(device))


def queue_of(stream: torch.Stream) -> Queue:
    """Return the queue of a stream of which PyTorch gives the number only."""
    return (_streams.get(stream.stream_id) or default_stream(stream.device_index)).queue


class Memory:
    """Memory of a storage, whose `bytes` only queued operations touch. `home` was the current queue when it began."""

    freed: ClassVar[deque[tuple[Queue, Callable[[], object]]]] = deque()
    """Works that overwrite memory that has ended. They are queued at the next operation: locks may be held before."""

    def __init__(self, size: int, home: Queue) -> None:
        self.home, self.users, self.recorded = home, set[Queue](), set[Queue]()
        self.bytes = torch.full((size,), POISON, dtype=torch.uint8, device="cpu")

    def __del__(self) -> None:
        if self.users - self.recorded:
            self.freed.append((self.home, partial(self.bytes.fill_, POISON)))


def memory_of(tensor: torch.Tensor) -> Memory:
    return tensor.untyped_storage().memory  # type: ignore[attr-defined,no-any-return]


class _BackwardCall:
    """Backward pass that a thread calls: its streams at the call, and those of its forward passes."""

    def __init__(self) -> None:
        self.streams = [current_stream(index) for index in range(len(GENERATORS))]
        self.points = [LATE.point(stream.queue) for stream in self.streams]
        self.changes = HERE.changes
        self.used: set[Stream] = set()

    def begin(self, _: Any) -> None:
        """Hook before the first node: from here on the thread of the nodes can find the call."""
        _calls[torch._C._current_graph_task_id()] = self

    def streams_of(self, sequence_nr: int) -> list[Stream]:
        """Return the streams that were current when the calling thread made the node with this sequence number."""
        place = bisect_right(self.changes, sequence_nr, key=itemgetter(0))
        streams = self.changes[place - 1][1] if place else {}
        return [streams.get(index) or default_stream(index) for index in range(len(GENERATORS))]


def _enter_node() -> None:
    """Make the streams of the forward pass current in a node of a backward pass, behind the nodes before it."""
    node: Any = torch._C._current_autograd_node()
    if node is None:
        return
    task, sequence_nr = key = torch._C._current_graph_task_id(), node._sequence_nr()
    last, HERE.node = HERE.node, key
    if last == key or task not in _calls:
        return
    call, before = _calls[task], HERE.streams if task == last[0] else {}
    if sequence_nr == _NO_SEQUENCE_NR and before:
        return  # a gradient is accumulated on the stream that made it
    streams = call.streams if sequence_nr == _NO_SEQUENCE_NR else call.streams_of(sequence_nr)
    HERE.streams = dict(enumerate(streams))
    for index, stream in enumerate(streams):
        LATE.put(stream.queue, call.points[index])
        if before.get(index, stream) is not stream:
            stream.wait_stream(before[index])
    call.used.update(streams)


class StreamEngine(type(Variable._execution_engine)):  # type: ignore[misc]
    """Autograd engine whose nodes run on the streams of the forward pass; the caller's streams wait for them.

    PyTorch makes the threads of the nodes at the first backward pass of the process, of any device. Without `threads`,
    as that was before the device was registered, the nodes run in the thread that calls.
    """

    threads = True

    def run_backward(self, roots: Any, *args: Any, **options: Any) -> Any:
        call, streams, last = _BackwardCall(), HERE.streams, HERE.node
        nodes = [getattr(root, "grad_fn", None) or getattr(root, "node", None) for root in roots]
        hooks = [node.register_prehook(call.begin) for node in nodes if node is not None]
        try:
            with torch.autograd.set_multithreading_enabled(self.threads and torch.autograd.is_multithreading_enabled()):
                return super().run_backward(roots, *args, **options)
        finally:
            for hook in hooks:
                hook.remove()
            for task in [task for task, running in list(_calls.items()) if running is call]:
                del _calls[task]
            HERE.streams, HERE.node = streams, last
            HERE.changes.append((torch._C._autograd._get_sequence_nr(), streams))  # nodes here may have set others
            for stream in call.used:
                call.streams[stream.device_index].wait_stream(stream)


def device_count() -> int:
    return len(GENERATORS)


def get_device_properties(device: Any = None) -> SimpleNamespace:
    """Return the properties of a device: each process has devices of its own."""
    return SimpleNamespace(name=NAME, uuid=f"{os.getpid()}:{index_of(device)}", total_memory=1 << 30)


def is_available() -> bool:
    return True


is_bf16_supported = is_available


def register_host_memory(memory: torch.Tensor) -> None:
    """Let copies from and to a host tensor's memory run late, as those of pinned memory do."""
    memory.untyped_storage().pinned = True  # type: ignore[attr-defined]


def _is_in_bad_fork() -> bool:
    return False


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def manual_seed(seed: int) -> None:
    GENERATORS[HERE.device].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed all devices; torch.manual_seed does it."""
    for generator in GENERATORS:
        generator.manual_seed(seed)


def get_rng_state(device: Any = None) -> torch.Tensor:
    return GENERATORS[index_of(device)].get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    GENERATORS[index_of(device)].set_state(state)


def device_guard() -> Any:
    """Return a device guard that knows the devices.

    PyTorch asks Python for the type of a guard alone, and takes it that there is one device. Its virtual functions are
    in the table to which the C++ object points, in the order of PyTorch's header; a copy of the table has ours instead.
    """
    word, kind = ctypes.c_void_p, int(KIND)
    guard: Any = _DummyDeviceGuard()
    header = Path(torch.__file__).parent / "include/c10/core/impl/DeviceGuardImplInterface.h"
    names = re.findall(r"^\s*virtual [\w:*& ]+?[ *](\w+)\(", header.read_text(), re.MULTILINE)

    def set_device(_: int, device: int) -> None:
        if device >> 8 < device_count():  # a device without an index has 255
            HERE.device = device >> 8

    def exchange(this: int, device: int) -> int:
        before: int = HERE.device << 8 | kind
        set_device(this, device)
        return before

    setter = ctypes.CFUNCTYPE(None, word, ctypes.c_uint16)(set_device)
    ours: dict[str, Any] = {
        # not in Python: a collection of garbage in there may free a tensor, which asks again and gets no answer
        "type": ctypes.CFUNCTYPE(ctypes.c_int8, word)(lambda _: kind),
        "deviceCount": ctypes.CFUNCTYPE(ctypes.c_int8, word)(lambda _: device_count()),
        "getDevice": ctypes.CFUNCTYPE(ctypes.c_uint16, word)(lambda _: HERE.device << 8 | kind),
        "exchangeDevice": ctypes.CFUNCTYPE(ctypes.c_uint16, word, ctypes.c_uint16)(exchange),
        "setDevice": setter,
        "uncheckedSetDevice": setter,
        "synchronizeDevice": ctypes.CFUNCTYPE(None, word, ctypes.c_int8)(lambda _, index: synchronize(index)),
    }
    size = ctypes.sizeof(word)
    place = word.from_address(id(guard) + 2 * size).value or 0  # a Python object of pybind11 begins with three words
    table = (word.from_address(place).value or 0) - 2 * size  # two words precede the functions, two destructors follow
    copy = (word * (len(names) + 4)).from_buffer_copy((word * (len(names) + 4)).from_address(table))
    for name, function in ours.items():
        copy[2 + names.index(name)] = ctypes.cast(function, word).value
    word.from_address(place).value = ctypes.addressof(copy) + 2 * size
    guard.kept = (ours, copy)  # for as long as PyTorch has the guard
    return guard
