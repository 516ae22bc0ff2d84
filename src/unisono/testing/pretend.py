"""The PyTorch device `pretend`: an accelerator's behaviour on a machine that has none, for tests of code that uses streams.

`use_pretend()` registers it; then `torch.device("pretend:1")`, `tensor.to("pretend")` and `torch.get_device_module("pretend")`, which is
this module, work as with CUDA:

- The host cannot read its memory. `data_ptr()` is no address of the process. New memory holds NaN (integers: -1).
- Operations are queued on the current stream of the thread and run late: when somebody waits for them, or when a seed chooses
  (`reseed`). Copies between the device and pinned memory with `non_blocking=True` read and write the host memory then. A missing
  synchronisation gives wrong numbers for some seeds.
- Memory that was used on another stream than that it was allocated on, and is dropped without `record_stream`, is overwritten by its
  own stream.
- Errors of shapes and devices are raised at the call; errors of values (an index out of range) by a later synchronisation.

Unlike CUDA: the backward pass runs on the streams of the forward pass, but in one order (each stream waits for the one before), and the
nodes' streams are those of the thread that calls `backward`; parameters' gradients are accumulated on the stream that made them.
`torch.Stream` and `torch.Event` without a device module, graphs, sparse tensors and memory statistics are not there. Streams have no
priority. A random operation draws from one host generator per device, so its numbers are not CUDA's.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from unisono.testing.late import Queue
from unisono.testing.pretend_streams import (
    DEVICES,
    LATE,
    Event,
    Stream,
    current_device,
    current_stream,
    default_stream,
    device,
    device_guard,
    index_of,
    install_engine,
    set_device,
    set_stream,
    stream,
    stream_of_number,
    synchronize,
)

__all__ = [
    "Event",
    "Stream",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "get_amp_supported_dtype",
    "get_rng_state",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "reseed",
    "set_device",
    "set_rng_state",
    "set_stream",
    "stream",
    "synchronize",
    "use_pretend",
]

NAME = "pretend"
POISON = 255
"""Byte that new and reused memory is full of: NaN in floating-point numbers."""

_aten = torch.ops.aten
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_keys = torch._C.DispatchKey
_APART = functools.reduce(
    lambda keys, key: keys | torch._C.DispatchKeySet(key),
    (_keys.ADInplaceOrView, _keys.AutocastCPU, _keys.AutocastPrivateUse1, _keys.Python, _keys.PythonTLSSnapshot),
    torch._C.DispatchKeySet(_keys.AutogradCPU),
)
_libraries: list[torch.library.Library] = []
_generators: list[torch.Generator] = []
_addresses = count(0x7000_0000_0000_0000, 1 << 32)  # no process can have such addresses


def use_pretend(seed: int = 0, devices: int = 2) -> None:
    """Register the device `pretend` with so many devices, if that has not been done, and `reseed`."""
    if not _libraries:
        _register(devices)
    elif devices != DEVICES[0]:
        raise RuntimeError(
            f"pretend has {DEVICES[0]} devices already: ask for {devices} in the first call of the process"
        )
    reseed(seed)


def reseed(seed: int) -> None:
    """Run all that is queued; from now on the seed chooses what runs when."""
    LATE.reseed(seed)


# The memory of the device


class _Block:
    """Bytes of a storage, which only queued operations touch; `home` is the queue that was current at its allocation."""

    __slots__ = ("bytes", "home", "recorded", "users")

    def __init__(self, size: int, home: Queue) -> None:
        self.bytes = torch.full((size,), POISON, dtype=torch.uint8, device="cpu")
        self.home, self.users, self.recorded = home, set[Queue](), set[Queue]()


class _Owner:
    """What a storage holds: its end is the end of the storage."""

    __slots__ = ("block",)

    def __init__(self, block: _Block) -> None:
        self.block = block

    def __del__(self) -> None:
        if self.block.users - self.block.recorded:
            _freed.append(self.block)  # not handled here: locks may be held


_freed: deque[_Block] = deque()


def _overwrite_freed() -> None:
    while _freed:
        block = _freed.popleft()
        LATE.put(block.home, functools.partial(block.bytes.fill_, POISON))


def _block(tensor: torch.Tensor) -> _Block:
    return tensor.untyped_storage().owner.block  # type: ignore[attr-defined,no-any-return]


@functools.cache
def _template(index: int, dtype: torch.dtype) -> torch.Tensor:
    """Return an empty tensor on a device: one of the host, which changes its device on its way through DLPack."""
    capsule = torch.utils.dlpack.to_dlpack(torch.empty(0, dtype=dtype, device="cpu"))
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address = pointer(capsule, b"dltensor")
    (ctypes.c_int32 * 2).from_address(address + ctypes.sizeof(ctypes.c_void_p))[:] = [12, index]  # kDLExtDev
    return torch.utils.dlpack.from_dlpack(capsule)


def _new(size: Any, stride: Any, dtype: torch.dtype, index: int) -> torch.Tensor:
    """Return a tensor on a device with new memory."""
    reach = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True)) if 0 not in size else 0
    block = _Block(reach * dtype.itemsize, current_stream(index).queue)
    storage = torch._C._construct_storage_from_data_pointer(
        next(_addresses), torch.device(NAME, index), reach * dtype.itemsize
    )
    storage.owner = _Owner(block)
    tensor = _aten.as_strided.default.redispatch(_CPU, _template(index, dtype), [0], [1])
    return _aten.set_.source_Storage_storage_offset.redispatch(_CPU, tensor, storage, 0, size, stride)  # type: ignore[no-any-return]


def _host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the hidden content of a tensor on a device; of a host tensor, a copy."""
    if tensor.device.type != NAME:
        return tensor.clone()
    bytes_ = _block(tensor).bytes
    content = bytes_[:0].view(tensor.dtype).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    return _with_bits(content, tensor)


def _with_bits(content: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    content = torch._conj(content) if tensor.is_conj() else content
    return torch._neg_view(content) if tensor.is_neg() else content


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return _with_bits(torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta"), tensor)


# Operations


@contextmanager
def _apart() -> Iterator[None]:
    """Context in which operations are plain: without gradients, autocast and the modes of the thread."""
    with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(_APART):
        yield


def _queue(index: int, tensors: list[torch.Tensor], work: Callable[[], object]) -> Stream:
    """Queue a work that uses these tensors on the current stream of the device; return the stream."""

    def run() -> None:
        with _apart():
            work()

    _overwrite_freed()
    stream = current_stream(index)
    for block in map(_block, tensors):
        if block.home is not stream.queue:
            block.users.add(stream.queue)
    LATE.put(stream.queue, run)
    return stream


@functools.cache
def _is_view(op: Any) -> bool:
    return any(value.alias_info is not None and not value.alias_info.is_write for value in op._schema.returns)


@functools.cache
def _is_random(op: Any) -> bool:
    return any(argument.name == "generator" for argument in op._schema.arguments)


@functools.cache
def _needs_values(op: Any) -> bool:
    return torch.Tag.data_dependent_output in op.tags or torch.Tag.dynamic_output_shape in op.tags


def _device_of(op: Any, leaves: list[Any]) -> int:
    """Return the index of the device of the arguments, which have to be on one device."""
    found = {
        leaf.device: None
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and (leaf.dim() or leaf.device.type == NAME)
    }
    if len(found) > 1:
        names = " and ".join(map(str, found))
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {names}! ({op})"
        )
    places = [*found, *(leaf for leaf in leaves if isinstance(leaf, torch.device))]
    return index_of(places[0] if places else None)


def _moved(leaf: Any, to: str, tensor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tensor(leaf)
    return torch.device(to) if isinstance(leaf, torch.device) else leaf


def _fallback(op: Any, *args: Any, **options: Any) -> Any:
    """Run any operation: its outputs' shapes now, on meta tensors, its numbers later, on the hidden contents."""
    if _is_view(op):
        return op.redispatch(_CPU, *args, **options)
    if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(op.name(), "CPU"):
        raise NotImplementedError(f"{op} is not there on pretend, as the host does not have it")
    leaves, form = pytree.tree_flatten((args, options))
    index = _device_of(op, leaves)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.device.type == NAME]
    with _apart():
        hidden, random = (
            pytree.tree_unflatten([_moved(leaf, "cpu", _host) for leaf in leaves], form),
            _generator(op, options, index),
        )
        metas = [_moved(leaf, "meta", _meta) for leaf in leaves]
        shapes = None if _needs_values(op) else _shapes(op, pytree.tree_unflatten(metas, form))
    if shapes is None:
        return _run_now(op, index, tensors, hidden, random)
    known = {id(meta): leaf for meta, leaf in zip(metas, leaves, strict=True) if isinstance(meta, torch.Tensor)}
    for meta in filter(lambda meta: id(meta) in known, pytree.tree_leaves(shapes)):
        if meta.size() != known[id(meta)].size():
            _resize(known[id(meta)], meta.size())
            return _fallback(op, *args, **options)
    flat, shape = pytree.tree_flatten(shapes)
    fresh = {
        place: _new(meta.size(), meta.stride(), meta.dtype, index)
        for place, meta in enumerate(flat)
        if isinstance(meta, torch.Tensor) and id(meta) not in known
    }
    contents = {place: _host(tensor) for place, tensor in fresh.items()}

    def work() -> None:
        values = pytree.tree_leaves(op(*hidden[0], **{**hidden[1], **random}))
        for place, content in contents.items():
            if values[place] is not None:
                content.copy_(values[place])

    _queue(index, [*tensors, *fresh.values()], work)
    return pytree.tree_unflatten(
        [fresh.get(place, known.get(id(meta), meta)) for place, meta in enumerate(flat)], shape
    )


def _shapes(op: Any, call: Any) -> Any:
    """Return the outputs on meta tensors, or None where only values give them."""
    try:
        return op(*call[0], **call[1])
    except NotImplementedError:
        return None


def _run_now(op: Any, index: int, tensors: list[torch.Tensor], hidden: Any, random: Any) -> Any:
    """Run an operation whose outputs' shapes depend on values: after what is queued, while the host waits."""
    values: list[Any] = []
    _queue(index, tensors, lambda: values.append(op(*hidden[0], **{**hidden[1], **random}))).synchronize()
    inputs = {id(leaf): tensor for leaf, tensor in zip(_tensors(hidden), tensors, strict=False)}
    return pytree.tree_map_only(torch.Tensor, lambda value: inputs.get(id(value)) or _uploaded(value, index), values[0])


def _tensors(call: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor)]


def _uploaded(value: torch.Tensor, index: int) -> torch.Tensor:
    tensor = _new(value.size(), value.stride(), value.dtype, index)
    with _apart():
        _host(tensor).copy_(value)  # nobody has seen the memory yet
    return tensor


def _generator(op: Any, options: dict[str, Any], index: int) -> dict[str, torch.Generator]:
    """Return the generator of a random operation, seeded at the call: the numbers do not depend on when it runs."""
    if not _is_random(op):
        return {}
    if options.get("generator") is not None:
        raise RuntimeError(
            f"{op}: Expected a '{NAME}' device type for generator but found '{options['generator'].device.type}'"
        )
    seed = torch.empty((), dtype=torch.int64, device="cpu").random_(generator=_generators[index])
    return {"generator": torch.Generator().manual_seed(int(seed))}


# Operations of their own


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    return _new(size, stride, dtype or torch.get_default_dtype(), index_of(device))


def _empty(size: Any, *, dtype: Any = None, device: Any = None, memory_format: Any = None, **_: Any) -> torch.Tensor:
    shape = torch.empty(size, dtype=dtype, device="meta", memory_format=memory_format or torch.contiguous_format)
    return _new(size, shape.stride(), shape.dtype, index_of(device))


def _resize(tensor: torch.Tensor, size: Any, *, memory_format: Any = None) -> torch.Tensor:
    """Give a tensor another size, in new memory if its own is too small."""
    shape = torch.empty(size, dtype=tensor.dtype, device="meta", memory_format=memory_format or torch.contiguous_format)
    storage, offset = tensor.untyped_storage(), tensor.storage_offset()
    if (offset + shape.numel()) * tensor.dtype.itemsize > storage.nbytes():
        larger = _new([offset + shape.numel()], [1], tensor.dtype, tensor.device.index)
        kept = storage.nbytes() // tensor.dtype.itemsize
        if kept:
            old = _set_storage(_aten.alias.default.redispatch(_CPU, tensor), storage, 0, [kept], [1])
            _copy_from(old, _aten.as_strided.default.redispatch(_CPU, larger, [kept], [1]))
        storage = larger.untyped_storage()
    return _set_storage(tensor, storage, offset, size, shape.stride())


def _set_storage(tensor: torch.Tensor, *place: Any) -> torch.Tensor:
    return _aten.set_.source_Storage_storage_offset.redispatch(_CPU, tensor, *place)  # type: ignore[no-any-return]


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy from or to a device, late where CUDA is late."""
    on_device = [tensor for tensor in (source, target) if tensor.device.type == NAME]
    late = non_blocking or len(on_device) == 2
    with _apart():
        if source.device.type == NAME:
            content = _host(source)
        else:
            content = source if _is_pinned(source) and non_blocking else source.clone()
        place = _host(target) if target.device.type == NAME else target
    late = late and (target.device.type == NAME or _is_pinned(target))
    index, others = (
        on_device[0].device.index,
        {tensor.device.index for tensor in on_device[1:]} - {on_device[0].device.index},
    )
    for other in others:
        current_stream(index).wait_stream(current_stream(other))
    stream = _queue(index, on_device, lambda: place.copy_(content))
    for other in others:
        current_stream(other).wait_stream(stream)
    if not late:
        stream.synchronize()
    return target


def _copy_from_and_resize(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if source.size() != target.size():
        target.resize_(source.size())
    return _copy_from(source, target)


def _item(tensor: torch.Tensor) -> Any:
    current_stream(tensor.device).synchronize()
    return _host(tensor).item()


def _record_stream(tensor: torch.Tensor, stream: torch.Stream) -> None:
    _block(tensor).recorded.add(stream_of_number(stream.stream_id, stream.device_index).queue)


def _dropout(tensor: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    if not train or p == 0:
        return tensor.clone(), torch.ones_like(tensor, dtype=torch.bool)
    kept = torch.empty_like(tensor, dtype=torch.bool).bernoulli_(1 - p)
    return tensor * kept * (1 / (1 - p) if p < 1 else 0.0), kept


def _index_device(op: Any) -> Callable[..., Any]:
    """Return an operation with indices, which may be on the host."""

    def run(tensor: torch.Tensor, indices: list[Any], *args: Any, **options: Any) -> Any:
        there = [index if index is None else index.to(tensor.device) for index in indices]
        return _fallback(op, tensor, there, *args, **options)

    return run


def _is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
    return getattr(tensor.untyped_storage(), "pinned", False)


def _pinned_copy(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    copy = torch.empty_like(tensor, device="cpu")
    copy.untyped_storage().pinned = True  # type: ignore[attr-defined]
    return copy.copy_(tensor)


def _host_empty(kernel: Any) -> Callable[..., torch.Tensor]:
    """Return the host's allocation; with `pin_memory` it says so on the storage."""

    def run(size: Any, *, pin_memory: bool | None = None, **options: Any) -> torch.Tensor:
        tensor: torch.Tensor = kernel.call_boxed(_CPU, size, **options)
        if pin_memory:
            tensor.untyped_storage().pinned = True  # type: ignore[attr-defined]
        return tensor

    return run


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "resize_": _resize,
    "set_.source_Storage": functools.partial(_aten.set_.source_Storage.redispatch, _CPU),
    "set_.source_Storage_storage_offset": _set_storage,
    "set_.source_Tensor": functools.partial(_aten.set_.source_Tensor.redispatch, _CPU),
    "_copy_from": _copy_from,
    "_copy_from_and_resize": _copy_from_and_resize,
    "_local_scalar_dense": _item,
    "record_stream": _record_stream,
    "native_dropout": _dropout,
    "index.Tensor_out": _index_device(_aten.index.Tensor_out),
    "_index_put_impl_": _index_device(_aten._index_put_impl_.default),
    "convolution_overrideable": functools.partial(_fallback, _aten.convolution.default),
    "convolution_backward_overrideable": lambda gradient, tensor, weight, *args: _fallback(
        _aten.convolution_backward.default, gradient, tensor, weight, [weight.size(0)], *args
    ),
}

_LOW_PRECISION = (
    *(
        "linear",
        "matmul",
        "mm",
        "mv",
        "addmm",
        "addmv",
        "bmm",
        "baddbmm",
        "addbmm",
        "prelu",
        "scaled_dot_product_attention",
    ),
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input"),
)
_FULL_PRECISION = (
    *(
        "softmax.int",
        "log_softmax.int",
        "layer_norm",
        "group_norm",
        "cross_entropy_loss",
        "nll_loss",
        "nll_loss_nd",
        "mse_loss",
        "l1_loss",
    ),
    *(
        "exp",
        "log",
        "pow.Tensor_Scalar",
        "pow.Tensor_Tensor",
        "rsqrt",
        "norm.Scalar",
        "sum",
        "sum.dim_IntList",
        "prod",
        "cumsum",
        "softplus",
    ),
)
"""Operations that autocast runs in its type and in float32, as CUDA does: those of networks that tests train."""


def _autocast(op: Any, dtype: Callable[[], torch.dtype]) -> Callable[..., Any]:
    def cast(leaf: Any) -> Any:
        usable = (
            isinstance(leaf, torch.Tensor)
            and leaf.device.type == NAME
            and leaf.is_floating_point()
            and leaf.dtype != torch.float64
        )
        return leaf.to(dtype()) if usable else leaf

    def run(*args: Any, **options: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_keys.AutocastPrivateUse1)):
            args, options = pytree.tree_map(cast, (args, options))
            return op(*args, **options)

    return run


# The device module


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return DEVICES[0]


def is_bf16_supported() -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def manual_seed(seed: int) -> None:
    _generators[current_device()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for generator in _generators:
        generator.manual_seed(seed)


def get_rng_state(device: Any = None) -> torch.Tensor:
    return _generators[index_of(device)].get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    _generators[index_of(device)].set_state(state)


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return True

    def is_built(self) -> bool:
        return True

    def has_primary_context(self, index: int) -> bool:
        return True


def _new_storage(cls: Any, *args: Any, device: Any = None, **options: Any) -> Any:
    if device is not None and torch.device(device).type == NAME:
        return torch.empty(*args, dtype=torch.uint8, device=device).untyped_storage()
    options = options if device is None else {**options, "device": device}
    return torch._C.StorageBase.__new__(cls, *args, **options)


def _register(devices: int) -> None:
    DEVICES[0] = devices
    _generators.extend(torch.Generator() for _ in range(devices))
    manual_seed_all(torch.initial_seed())
    _setup_privateuseone_for_python_backend(NAME, sys.modules[__name__], _Hooks(), device_guard())
    install_engine()
    torch.UntypedStorage.__new__ = _new_storage  # type: ignore[method-assign]
    every, ours = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every.fallback(_fallback, "PrivateUse1")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name, operation in _OPERATIONS.items():
        ours.impl(name, operation, "PrivateUse1")
    for names, dtype in (
        (_LOW_PRECISION, lambda: torch.get_autocast_dtype(NAME)),
        (_FULL_PRECISION, lambda: torch.float32),
    ):
        for name in names:
            packet, _, overload = name.partition(".")
            ours.impl(
                name, _autocast(getattr(getattr(_aten, packet), overload or "default"), dtype), "AutocastPrivateUse1"
            )
    host = {
        "is_pinned": _is_pinned,
        "_pin_memory": _pinned_copy,
        "empty.memory_format": _host_empty(torch.library.get_kernel("aten::empty.memory_format", "CPU")),
    }
    for name, operation in host.items():
        ours.impl(name, operation, "CPU", allow_override=True)
    _libraries.extend((every, ours))
