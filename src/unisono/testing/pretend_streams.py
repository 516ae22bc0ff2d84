"""Streams and events of the device `pretend`, and which device and streams are current in a thread, backward passes included."""

from __future__ import annotations

import ctypes
import re
import threading
import weakref
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch.autograd import Variable

from unisono.testing.late import Late, Mark, Queue

LATE = Late()
_NO_NUMBER = 2**64 - 1  # sequence number of nodes that accumulate gradients
_numbers = count(1)
_streams: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()
_defaults: dict[int, Stream] = {}
_calls: dict[int, _Call] = {}
DEVICES = [1]
"""Number of devices, once they are registered."""


class _Thread(threading.local):
    """Current device and streams of a thread, and where its forward passes changed streams."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Stream] = {}
        self.changes: list[tuple[int, dict[int, Stream]]] = []
        self.node = (-1, -1)


_thread = _Thread()


def index_of(device: Any = None) -> int:
    """Return the index of a device (None or without an index: the current one)."""
    if isinstance(device, str):
        device = torch.device(device)
    index = device.index if isinstance(device, torch.device) else device
    if index is None:
        return _thread.device
    if not 0 <= index < DEVICES[0]:
        raise RuntimeError(f"pretend:{index} does not exist: there are {DEVICES[0]} devices")
    return int(index)


class Stream(torch.Stream):  # type: ignore[misc]  # final for mypy only
    """Queue of operations of a device. Its operations run late; see `unisono.testing.pretend`."""

    def __new__(cls, device: Any = None, priority: int = 0) -> Stream:
        kind = int(torch._C._autograd.DeviceType.PrivateUse1)
        stream: Stream = super().__new__(cls, stream_id=next(_numbers), device_index=index_of(device), device_type=kind)
        stream.queue = Queue(stream.stream_id, stream.device_index)
        _streams[stream.stream_id] = stream
        return stream

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        """Any priority counts as 0."""

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        LATE.wait(self.queue, LATE.mark(stream.queue))

    def query(self) -> bool:
        return LATE.ask(LATE.mark(self.queue))

    def synchronize(self) -> None:
        LATE.run_to(LATE.mark(self.queue))


class Event:
    """Mark in a stream, which other streams and the host wait for."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.enable_timing = enable_timing
        self._mark: Mark | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._mark = LATE.mark((stream or current_stream()).queue)

    def wait(self, stream: Stream | None = None) -> None:
        if self._mark is not None:
            LATE.wait((stream or current_stream()).queue, self._mark)

    def query(self) -> bool:
        return self._mark is None or LATE.ask(self._mark)

    def synchronize(self) -> None:
        if self._mark is not None:
            LATE.run_to(self._mark)

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds from this event to `end`; both must have happened."""
        if not (self.enable_timing and end.enable_timing):
            raise ValueError("both events need enable_timing=True")
        if self._mark is None or end._mark is None or self._mark.seconds is None or end._mark.seconds is None:
            raise RuntimeError("both events must be recorded and have happened: synchronize with them first")
        return (end._mark.seconds - self._mark.seconds) * 1000


def default_stream(device: Any = None) -> Stream:
    """Return the stream of a device that is current until another one is set."""
    index = index_of(device)
    return _defaults.get(index) or _defaults.setdefault(index, Stream(index))


def current_stream(device: Any = None) -> Stream:
    """Return this thread's stream of a device: in a backward pass that of the forward pass."""
    _follow_backward()
    index = index_of(device)
    return _thread.streams.get(index) or default_stream(index)


def set_stream(stream: Stream) -> None:
    """Make a stream the current one of its device in this thread."""
    _follow_backward()
    _thread.streams = {**_thread.streams, stream.device_index: stream}
    _thread.changes.append((torch._C._autograd._get_sequence_nr(), _thread.streams))


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
    before, _thread.device = _thread.device, index_of(device)
    try:
        yield
    finally:
        _thread.device = before


def set_device(device: Any) -> None:
    """Make a device the current one of this thread."""
    _thread.device = index_of(device)


def current_device() -> int:
    """Return the index of the current device."""
    return _thread.device


def synchronize(device: Any = None) -> None:
    """Run everything that has been queued on a device."""
    LATE.run_device(index_of(device))


def stream_of_number(number: int, index: int) -> Stream:
    """Return the stream with a `stream_id`, or the default stream of the device."""
    return _streams.get(number) or default_stream(index)


class _Call:
    """Backward pass that a thread has called: its streams at the call, and what the forward pass used before."""

    def __init__(self) -> None:
        self.streams = [current_stream(index) for index in range(DEVICES[0])]
        self.marks = [LATE.mark(stream.queue) for stream in self.streams]
        self.changes = _thread.changes
        self.used: set[Stream] = set()

    def begin(self, gradients: Any) -> None:
        _calls[torch._C._current_graph_task_id()] = self

    def streams_of(self, number: int) -> list[Stream]:
        """Return the streams that were current when the thread made the node with this sequence number."""
        place = bisect_right(self.changes, number, key=itemgetter(0))
        streams = self.changes[place - 1][1] if place else {}
        return [streams.get(index) or default_stream(index) for index in range(DEVICES[0])]


def _follow_backward() -> None:
    """Make the streams of the forward pass current where a node of a backward pass begins, behind what came before."""
    node: Any = torch._C._current_autograd_node()
    if node is None:
        return
    task, number = key = torch._C._current_graph_task_id(), node._sequence_nr()
    last, _thread.node = _thread.node, key
    call = _calls.get(task)
    if last == key or call is None:
        return
    before = _thread.streams
    if task == last[0]:
        streams = call.streams_of(number) if number != _NO_NUMBER else None
    else:
        streams = call.streams_of(number) if number != _NO_NUMBER else call.streams
        before = {}
    for stream in streams or ():
        index = stream.device_index
        LATE.wait(stream.queue, call.marks[index])
        if index in before and before[index] is not stream:
            stream.wait_stream(before[index])
        call.used.add(stream)
    if streams is not None:
        _thread.streams = {stream.device_index: stream for stream in streams}


class Engine(type(Variable._execution_engine)):  # type: ignore[misc]
    """Autograd engine whose nodes run on the streams of the forward pass; the caller's streams wait for them."""

    def run_backward(self, roots: Any, *args: Any, **options: Any) -> Any:
        call = _Call()
        nodes = [getattr(root, "grad_fn", None) or getattr(root, "node", None) for root in roots]
        hooks = [node.register_prehook(call.begin) for node in nodes if node is not None]
        streams, node = _thread.streams, _thread.node
        try:
            return super().run_backward(roots, *args, **options)
        finally:
            for hook in hooks:
                hook.remove()
            _thread.streams, _thread.node = streams, node
            for task in [task for task, other in list(_calls.items()) if other is call]:
                del _calls[task]
            for stream in call.used:
                call.streams[stream.device_index].wait_stream(stream)


def install_engine() -> None:
    """Let backward passes know streams."""
    Variable._execution_engine = Engine()


class _Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


def device_guard() -> Any:
    """Return a device guard that knows this module's devices.

    PyTorch asks Python for the type of a guard only and takes it that there is one device. Its virtual functions stand in the table to
    which the C++ object points, in the order of PyTorch's header; a copy of the table has ours in their places.
    """
    guard, word = _Guard(), ctypes.c_void_p
    header = Path(torch.__file__).parent / "include/c10/core/impl/DeviceGuardImplInterface.h"
    names = re.findall(r"^\s*virtual [\w:*& ]+?[ *](\w+)\(", header.read_text(), re.MULTILINE)
    kind = int(torch._C._autograd.DeviceType.PrivateUse1)

    def set_index(this: int, device: int) -> None:
        if device >> 8 < DEVICES[0]:  # a device without an index has 255
            _thread.device = device >> 8

    def exchange(this: int, device: int) -> int:
        before = _thread.device
        set_index(this, device)
        return before << 8 | kind

    ours = {
        "deviceCount": ctypes.CFUNCTYPE(ctypes.c_int8, word)(lambda this: DEVICES[0]),
        "getDevice": ctypes.CFUNCTYPE(ctypes.c_uint16, word)(lambda this: _thread.device << 8 | kind),
        "exchangeDevice": ctypes.CFUNCTYPE(ctypes.c_uint16, word, ctypes.c_uint16)(exchange),
        "setDevice": ctypes.CFUNCTYPE(None, word, ctypes.c_uint16)(set_index),
        "uncheckedSetDevice": ctypes.CFUNCTYPE(None, word, ctypes.c_uint16)(set_index),
        "synchronizeDevice": ctypes.CFUNCTYPE(None, word, ctypes.c_int8)(lambda this, index: synchronize(index)),
    }
    place = word.from_address(id(guard) + 2 * ctypes.sizeof(word)).value or 0
    table = word.from_address(place).value or 0
    size = len(names) + 4  # two words before the functions, two destructors after them
    copy = (word * size).from_buffer_copy((word * size).from_address(table - 2 * ctypes.sizeof(word)))
    for name, function in ours.items():
        copy[2 + names.index(name)] = ctypes.cast(function, word).value
    word.from_address(place).value = ctypes.addressof(copy) + 2 * ctypes.sizeof(word)
    guard.kept = (ours, copy)
    return guard
