"""Collectives of tensors on a device, by copies in host memory.

An allreduce copies and sums piece by piece, each direction on a stream of its own:

    to the host      piece 0 │ piece 1 │ piece 2 │
    sum                      │ piece 0 │ piece 1 │ piece 2 │
    to the device                      │ piece 0 │ piece 1 │ piece 2 │

n bytes in k pieces take about max(copy, sum) (1 + 2 / k). Any other collective copies its tensors as a whole, before
and after. The results are as the host's; the calling thread's stream waits for them, the host does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from unisono.collectives.checks import Checks
from unisono.collectives.group import Group
from unisono.collectives.payload import find_aliases, flat_of, is_writable, put_back
from unisono.device import device_of, host_memory, is_on_host, pieces_of, streams_of
from unisono.errors import TensorError

Allreduce = Callable[[Group, torch.Tensor, str, str | None, str], torch.Tensor]

Copies = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Tensors of a device with their copies in the host's memory, by the `id` of the tensor."""


def is_on_device(*tensors: torch.Tensor) -> bool:
    """Return True where a tensor lies in the memory of a device."""
    return not all(map(is_on_host, tensors))


def allreduce_staged(
    allreduce: Allreduce, group: Group, tensor: torch.Tensor, algorithm: str, wire: str | None, op: str
) -> None:
    """Reduce a device's tensor over all ranks, in place."""
    streams = streams_of(tensor.device)
    flat = flat_of(tensor)
    host = host_memory(flat.numel(), flat.dtype, tensor.device)
    pieces = pieces_of(flat.numel(), flat.itemsize)
    computed, copied = streams.record(), []
    with streams.outgoing(computed) as stream:
        flat.record_stream(stream)
        for piece in pieces:
            host[piece].copy_(flat[piece], non_blocking=True)
            copied.append(streams.record())
    with streams.incoming(computed) as stream:
        flat.record_stream(stream)
        for piece, arrived in zip(pieces, copied, strict=True):
            arrived.synchronize()
            allreduce(group, host[piece], algorithm, wire, op)
            flat[piece].copy_(host[piece], non_blocking=True)
        back = streams.record()
    streams.wait(back)
    put_back(tensor, flat)


def on_host(
    group: Group,
    name: str,
    tensors: Sequence[torch.Tensor],
    written: Sequence[torch.Tensor],
    collective: Callable[..., object],
) -> None:
    """Give `collective` copies of tensors in the host's memory, and copy the `written` ones of them back.

    Raises TensorError for tensors on several devices, and for written ones that share memory.
    """
    with Checks(group, name):
        device_of(tensors, name)
        for tensor in tensors:
            refuse_unsupported(tensor)
        refuse_shared(name, written)
    call_with_copies(collective, tensors, written)


def call_with_copies(
    function: Callable[..., object], arguments: Sequence[Any], written: Sequence[torch.Tensor]
) -> None:
    """Call `function` with copies in pinned memory in place of a device's tensors, waiting for the streams that fill
    them; copy those of `written` alone back, in the order of the current stream: an output may lie in an input."""
    copies: Copies = {}
    function(*[_on_host(value, copies) for value in arguments])
    filled = set(map(id, written))
    for key, (tensor, copy) in copies.items():
        if key in filled:
            tensor.detach().copy_(copy, non_blocking=True)


def _on_host(value: Any, copies: Copies) -> Any:
    """Return `value` with copies in place of a device's tensors, which are added to `copies`.

    A nested function that calls itself is a reference cycle: it would keep the tensors until a garbage collection.
    """
    if isinstance(value, list):
        return [_on_host(item, copies) for item in value]
    if not isinstance(value, torch.Tensor) or is_on_host(value):
        return value
    if id(value) not in copies:
        copy = host_memory(value.numel(), value.dtype, value.device).view(value.shape)
        copy.copy_(value.detach())  # waits for the stream
        copies[id(value)] = value, copy
    return copies[id(value)][1]


def refuse_unsupported(tensor: torch.Tensor) -> None:
    """Raise TensorError for a tensor that is not dense."""
    if tensor.layout is not torch.strided:
        raise TensorError(f"unsupported tensor: {tensor.layout} on {tensor.device}; convert it to a dense tensor")


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return all tensors of an argument: a tensor, or a list of them or of lists of them."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, list) else []


def refuse_shared(operation: str, written: Sequence[torch.Tensor]) -> None:
    """Raise TensorError if tensors that are written share memory; their copies on the host would hide that."""
    aliases = find_aliases(written) if all(map(is_writable, written)) else "several elements of an output"
    if aliases:
        raise TensorError(f"{operation}: {aliases} share memory; give each memory of its own")
