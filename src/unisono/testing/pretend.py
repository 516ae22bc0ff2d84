"""The PyTorch device `pretend`: an accelerator's behaviour without one, for tests of code that uses streams.

`use_pretend()` registers it; then `torch.device("pretend:1")`, `tensor.to("pretend")` and
`torch.get_device_module("pretend")` work as with CUDA:

- The host cannot read its memory: `data_ptr()` is no address of the process. New memory holds NaN (integers: -1).
- Operations are queued on the thread's current stream and run late: when somebody waits for them, or when a seed
  chooses (`reseed`). Copies between a device and pinned memory with `non_blocking=True` read and write the host's
  memory only then. A missing synchronisation gives wrong numbers for some seeds.
- Memory that was used on another stream than that it was allocated on, and is dropped without `record_stream`, is
  overwritten by the stream it was allocated on.
- Errors of shapes and devices are raised at the call; errors of values (an index out of range) by a later
  synchronisation.

From `use_pretend` on the process computes with one thread, on the host, too: a product's bits depend on the number.

Unlike CUDA, the nodes of a backward pass run in one order (each stream waits for the one before), on the streams that
the thread that calls `backward` used in the forward pass; gradients are accumulated on the stream that made them. The
nodes run in the thread that calls if the process has run a backward pass, on any device, before `use_pretend`. An error
of a hook in a backward pass ends the process. Streams have no priorities, and autocast changes nothing. What the host
has no kernel for (fused LSTM cells), graphs, sparse tensors, memory statistics, `torch.Event` and
`torch.accelerator.current_stream` are not there.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch.autograd import Variable
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from unisono.testing import pretend_device
from unisono.testing.pretend_device import GENERATORS, LATE, NAME, Memory, current_stream, index_of, memory_of, queue_of

_aten = torch.ops.aten
_key: Any = torch._C.DispatchKey
_CPU = torch._C.DispatchKeySet(_key.CPU)
_MODES = functools.reduce(
    lambda keys, key: keys | torch._C.DispatchKeySet(key),
    (_key.AutocastCPU, _key.Python, _key.PythonTLSSnapshot),
    torch._C.DispatchKeySet(_key.ADInplaceOrView),
)
_addresses = count(0x7000_0000_0000_0000, 1 << 32)  # no process can have such addresses
_libraries: list[torch.library.Library] = []
_Outline = tuple[list[Any], Any, dict[int, torch.Size]]
_outlines: dict[tuple[Any, ...], _Outline | None] = {}


def use_pretend(seed: int | None = 0, devices: int = 2) -> None:
    """Register `pretend` with so many devices, if that has not been done, and `reseed`."""
    if not _libraries:
        _register(devices)
    elif devices != len(GENERATORS):
        raise RuntimeError(f"{NAME} has {len(GENERATORS)} devices: ask for {devices} in the first call of the process")
    reseed(seed)


def reseed(seed: int | None) -> None:
    """Run all that is queued; from now on the seed chooses what runs when (None: what somebody waits for)."""
    torch.set_num_threads(1)
    LATE.reseed(seed)


@functools.cache
def _template(index: int, dtype: torch.dtype) -> torch.Tensor:
    """Return an empty tensor on a device: one of the host, which changes its device on its way through DLPack."""
    capsule = torch.empty(0, dtype=dtype, device="cpu").__dlpack__()
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    place = pointer(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p)
    (ctypes.c_int32 * 2).from_address(place)[:] = [12, index]  # kDLExtDev
    return torch.utils.dlpack.from_dlpack(capsule)


def _new(size: Any, stride: Any, dtype: torch.dtype, index: int) -> torch.Tensor:
    """Return a tensor on a device with new memory."""
    steps = sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    nbytes = 0 if 0 in size else (1 + steps) * dtype.itemsize
    storage: Any = torch._C._construct_storage_from_data_pointer(next(_addresses), torch.device(NAME, index), nbytes)
    storage.memory = Memory(nbytes, current_stream(index).queue)
    tensor = _aten.as_strided.default.redispatch(_CPU, _template(index, dtype), [0], [1])
    return _set_storage(tensor, storage, 0, size, stride)


def _set_storage(tensor: torch.Tensor, *place: Any) -> torch.Tensor:
    return _aten.set_.source_Storage_storage_offset.redispatch(_CPU, tensor, *place)  # type: ignore[no-any-return]


def _host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the hidden content of a tensor on a device."""
    content = memory_of(tensor).bytes[:0].view(tensor.dtype)
    content = content.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    return _with_bits(content, tensor.is_conj(), tensor.is_neg())


def _with_bits(tensor: torch.Tensor, conjugate: bool, negative: bool) -> torch.Tensor:
    tensor = torch._conj(tensor) if conjugate else tensor
    return torch._neg_view(tensor) if negative else tensor


@contextmanager
def _apart() -> Iterator[None]:
    """Context in which operations are plain: without gradients, autocast and the modes of the thread."""
    with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(_MODES):
        yield


def _queue(index: int, tensors: list[torch.Tensor], work: Callable[[], object]) -> pretend_device.Stream:
    """Queue a work that uses these tensors on the current stream of the device; return the stream."""

    def run() -> None:
        with _apart():
            work()

    while Memory.freed:
        LATE.put(*Memory.freed.popleft())
    stream = current_stream(index)
    for memory in map(memory_of, tensors):
        if memory.home is not stream.queue:
            memory.users.add(stream.queue)
    LATE.put(stream.queue, run)
    return stream


_INDEXED = ("aten::index.Tensor", "aten::index.Tensor_out", "aten::_index_put_impl_", "aten::index_put_")


def _is_number(leaf: torch.Tensor) -> bool:
    """Return whether a tensor of the host is a number that PyTorch has made a tensor: it does not widen other types."""
    small = torch.zeros((), dtype=torch.float16 if leaf.is_floating_point() else torch.uint8, device="cpu")
    return torch.result_type(small, leaf) != leaf.dtype


def _shaped(leaf: Any) -> Any:
    """Return a tensor without memory, or of memory that is not set, in place of a tensor."""
    if not isinstance(leaf, torch.Tensor):
        return torch.device("meta") if isinstance(leaf, torch.device) else leaf
    if (on_host := leaf.device.type == "cpu") and _is_number(leaf):
        return leaf
    device = "cpu" if on_host else "meta"
    tensor = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=device)
    return _with_bits(tensor, leaf.is_conj(), leaf.is_neg())


def _signature(leaf: Any) -> tuple[Any, ...]:
    """Return what shapes and types of outputs may depend on."""
    if not isinstance(leaf, torch.Tensor):
        return type(leaf), leaf  # 1, 1.0 and True are equal
    kind = leaf.device.type, leaf.device.type == "cpu" and _is_number(leaf)
    return *kind, leaf.dtype, leaf.size(), leaf.stride(), leaf.is_conj(), leaf.is_neg()


def _outline(op: Any, leaves: list[Any], form: Any) -> tuple[list[Any], Any] | None:
    """Return the outputs of an operation and their form; None if their shapes depend on values.

    An output is the index of an argument that the operation writes into, which gets its size, a meta tensor, or None.
    """
    modes = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    if (key := (op, form, *modes, *map(_signature, leaves))) not in _outlines:  # max_pool2d alone takes 10 ms
        _outlines[key] = _trace(op, leaves, form)
    outputs, output_form, sizes = _outlines[key] or (None, None, {})
    for place, size in sizes.items():
        if leaves[place].size() != size:
            _resize(leaves[place], size)
    return None if outputs is None else (outputs, output_form)


def _trace(op: Any, leaves: list[Any], form: Any) -> _Outline | None:
    """Run an operation on meta tensors. Return its outputs, their form, and the sizes of arguments written into."""
    if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(op.name(), "CPU"):
        raise NotImplementedError(f"{op} is not there on {NAME}, as the host does not have it")
    if torch.Tag.data_dependent_output in op.tags or torch.Tag.dynamic_output_shape in op.tags:
        return None
    shaped = [_shaped(leaf) for leaf in leaves]
    args, options = pytree.tree_unflatten(shaped, form)
    try:
        outputs, output_form = pytree.tree_flatten(op(*args, **options))
    except NotImplementedError:
        return None
    if not all(output is None or isinstance(output, torch.Tensor) for output in outputs):
        return None
    positions = {id(leaf): place for place, leaf in enumerate(shaped) if isinstance(leaf, torch.Tensor)}
    outputs = [positions.get(id(output), output) for output in outputs]
    return outputs, output_form, {place: shaped[place].size() for place in outputs if isinstance(place, int)}


@functools.cache
def _traits(op: Any) -> tuple[bool, bool]:
    """Return whether an operation gives a view, and whether it draws random numbers."""
    values = [value.alias_info for value in op._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in values)
    return is_view, any(argument.name == "generator" for argument in op._schema.arguments)


def _place(op: Any, leaves: list[Any]) -> int:
    """Return the index of the device of the arguments, which have to be on one device."""
    devices = {t.device: None for t in leaves if isinstance(t, torch.Tensor) and (t.dim() or t.device.type == NAME)}
    if len(devices) > 1:
        names = " and ".join(map(str, devices))
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {names}! ({op})"
        )
    positions = [*devices, *(leaf for leaf in leaves if isinstance(leaf, torch.device))]
    return index_of(positions[0] if positions else None)


def _hidden(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return _host(leaf) if leaf.device.type == NAME else leaf.clone() if not _is_number(leaf) else leaf
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _fallback(op: Any, *args: Any, **options: Any) -> Any:
    """Run any operation: the shapes of its outputs now, on meta tensors, its numbers later, on the hidden contents."""
    is_view, is_random = _traits(op)
    if is_view:
        return op.redispatch(_CPU, *args, **options)
    leaves, form = pytree.tree_flatten((args, options))
    if op.name() in _INDEXED:  # indices may be on the host
        leaves = [leaf.to(args[0].device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    index = _place(op, leaves)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.device.type == NAME]
    with _apart():
        outline = _outline(op, leaves, form)
        hidden = [_hidden(leaf) for leaf in leaves]
    hidden_args, hidden_options = pytree.tree_unflatten(hidden, form)
    if is_random:
        hidden_options["generator"] = _generator(op, options, index)
    if outline is None:
        values: list[Any] = []
        _queue(index, tensors, lambda: values.append(op(*hidden_args, **hidden_options))).synchronize()
        written = {id(content): leaf for content, leaf in zip(hidden, leaves, strict=True)}
        return pytree.tree_map_only(
            torch.Tensor,
            lambda tensor: _uploaded(tensor, index) if id(tensor) not in written else written[id(tensor)],
            values[0],
        )
    outputs, output_form = outline
    fresh = {
        place: _new(output.size(), output.stride(), output.dtype, index)
        for place, output in enumerate(outputs)
        if isinstance(output, torch.Tensor)
    }
    contents = {place: _host(tensor) for place, tensor in fresh.items()}

    def work() -> None:
        values = pytree.tree_leaves(op(*hidden_args, **hidden_options))
        for place, content in contents.items():
            if values[place] is not None and values[place].numel():  # some kernels leave out what nobody needs
                content.copy_(values[place])

    _queue(index, [*tensors, *fresh.values()], work)
    given = [leaves[output] if isinstance(output, int) else None for output in outputs]
    return pytree.tree_unflatten([fresh.get(place, leaf) for place, leaf in enumerate(given)], output_form)


def _uploaded(value: torch.Tensor, index: int) -> torch.Tensor:
    tensor = _new(value.size(), value.stride(), value.dtype, index)
    with _apart():
        _host(tensor).copy_(value)  # nobody has seen the memory yet
    return tensor


def _generator(op: Any, options: dict[str, Any], index: int) -> torch.Generator:
    """Return the generator of a random operation, seeded at the call: its numbers do not depend on when it runs."""
    if options.get("generator") is not None:
        raise RuntimeError(f"{op}: a generator of the host cannot be used on {NAME}; seed it with torch.manual_seed")
    seed = torch.empty((), dtype=torch.int64, device="cpu").random_(generator=GENERATORS[index])
    return torch.Generator().manual_seed(int(seed))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    return _new(size, stride, dtype or torch.get_default_dtype(), index_of(device))


def _empty(size: Any, *, dtype: Any = None, device: Any = None, memory_format: Any = None, **_: Any) -> torch.Tensor:
    shape = torch.empty(size, dtype=dtype, device="meta", memory_format=memory_format or torch.contiguous_format)
    return _new(size, shape.stride(), shape.dtype, index_of(device))


def _resize(tensor: torch.Tensor, size: Any, *, memory_format: Any = None) -> torch.Tensor:
    """Give a tensor another size, in new memory if its own is too small."""
    shape = torch.empty(size, dtype=tensor.dtype, device="meta", memory_format=memory_format or torch.contiguous_format)
    storage, offset = tensor.untyped_storage(), tensor.storage_offset()
    length, kept = offset + shape.numel(), storage.nbytes() // tensor.dtype.itemsize
    if length > kept:
        larger = _new([length], [1], tensor.dtype, tensor.device.index)
        _copy_from(_set_storage(tensor, storage, 0, [kept], [1]), larger[:kept])
        storage = larger.untyped_storage()
    return _set_storage(tensor, storage, offset, size, shape.stride())


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy from or to a device, late where CUDA is late."""
    devices = {tensor.device.index: tensor for tensor in (source, target) if tensor.device.type == NAME}
    up, down = source.device.type != NAME, target.device.type != NAME
    with _apart():
        content = _host(source) if not up else source if non_blocking and _is_pinned(source) else source.clone()
        place = target if down else _host(target)
    index, *others = devices
    streams = [current_stream(other) for other in others]
    for other in streams:
        current_stream(index).wait_stream(other)
    on_device = [tensor for tensor, on_host in ((source, up), (target, down)) if not on_host]
    stream = _queue(index, on_device, lambda: place.copy_(content))
    for other in streams:
        other.wait_stream(stream)
    if (up and not non_blocking) or (down and not (non_blocking and _is_pinned(target))):
        stream.synchronize()
    return target


def _item(tensor: torch.Tensor) -> Any:
    current_stream(tensor.device).synchronize()
    return _host(tensor).item()


def _dropout(tensor: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    if not train or p == 0:
        return tensor.clone(), torch.ones_like(tensor, dtype=torch.bool)
    kept = torch.empty_like(tensor, dtype=torch.bool).bernoulli_(1 - p)
    return tensor * kept * (1 / (1 - p) if p < 1 else 0.0), kept


def _is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:  # noqa: ARG001
    return getattr(tensor.untyped_storage(), "pinned", False)


def _pin(tensor: torch.Tensor) -> torch.Tensor:
    pretend_device.register_host_memory(tensor)
    return tensor


def _host_empty(kernel: Any, size: Any, *, pin_memory: bool | None = None, **options: Any) -> torch.Tensor:
    """Allocate on the host, as PyTorch's kernel does without an accelerator."""
    tensor: torch.Tensor = kernel.call_boxed(_CPU, size, **options)
    return _pin(tensor) if pin_memory else tensor


def _new_storage(cls: Any, *args: Any, device: Any = None, **options: Any) -> Any:
    """Make a storage; of a device, one that a tensor has."""
    if device is not None and torch.device(device).type == NAME:
        return torch.empty(*args, dtype=torch.uint8, device=device).untyped_storage()
    return torch._C.StorageBase.__new__(cls, *args, **options, **({} if device is None else {"device": device}))


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "resize_": _resize,
    "set_.source_Storage": functools.partial(_aten.set_.source_Storage.redispatch, _CPU),
    "set_.source_Storage_storage_offset": _set_storage,
    "set_.source_Tensor": functools.partial(_aten.set_.source_Tensor.redispatch, _CPU),
    "_copy_from": _copy_from,
    "_local_scalar_dense": _item,
    "record_stream": lambda tensor, stream: memory_of(tensor).recorded.add(queue_of(stream)),
    "native_dropout": _dropout,
    "convolution_overrideable": functools.partial(_fallback, _aten.convolution.default),
    "convolution_backward_overrideable": lambda gradient, tensor, weight, *args: _fallback(
        _aten.convolution_backward.default, gradient, tensor, weight, [weight.size(0)], *args
    ),
}


def _register(devices: int) -> None:
    GENERATORS[:] = [torch.Generator().manual_seed(torch.initial_seed()) for _ in range(devices)]
    _setup_privateuseone_for_python_backend(NAME, pretend_device, None, pretend_device.device_guard())
    Variable._execution_engine = pretend_device.StreamEngine()
    torch.UntypedStorage.__new__ = _new_storage  # type: ignore[method-assign]
    library: Any = torch.library
    fallbacks, aten = library.Library("_", "IMPL"), library.Library("aten", "IMPL")
    fallbacks.fallback(_fallback, "PrivateUse1")
    fallbacks.fallback(library.fallthrough_kernel, "AutocastPrivateUse1")
    for key in ("Conjugate", "Negative"):  # which would copy the source first, without end
        aten.impl("_copy_from", library.fallthrough_kernel, key)
    for name, operation in _OPERATIONS.items():
        aten.impl(name, operation, "PrivateUse1")
    empty = functools.partial(_host_empty, library.get_kernel("aten::empty.memory_format", "CPU"))
    aten.impl("empty.memory_format", empty, "CPU", allow_override=True)
    aten.impl("is_pinned", _is_pinned, "CPU", allow_override=True)
    aten.impl("_pin_memory", lambda tensor, _=None: _pin(tensor.clone()), "CPU", allow_override=True)
    _libraries.extend((fallbacks, aten))
    try:
        with torch.enable_grad():
            torch.autograd.backward(torch.zeros((), device=f"{NAME}:{devices - 1}", requires_grad=True).neg())
    except RuntimeError:  # the engine has no thread for the device
        pretend_device.StreamEngine.threads = False
