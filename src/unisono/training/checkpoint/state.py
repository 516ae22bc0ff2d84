"""States as named tensors and JSON: nothing is pickled, and memory that two names share is stored once.

{"encode.weight": W, "decode.weight": W, "head._extra_state": {"version": (3, 1)}}

tensors    {"encode.weight": W}
outline    {"dict": [["encode.weight", {"tensor": "encode.weight"}],
                     ["decode.weight", {"tensor": "encode.weight"}],
                     ["head._extra_state", {"dict": [["version", {"tuple": [3, 1]}]]}]]}
"""

from __future__ import annotations

from collections import OrderedDict
from functools import lru_cache
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save

from unisono.errors import CheckpointError

Outline = Any
"""JSON: None, bool, int, float and str stand for themselves; other values are objects with one key, their kind."""

SCALARS = (type(None), bool, int, float, str)
CONTAINERS: dict[type, str] = {list: "list", tuple: "tuple", torch.Size: "tuple", dict: "dict", OrderedDict: "dict"}
"""Exact types only: a subclass would not be restored as itself."""


def flatten_state(value: object, what: str) -> tuple[dict[str, torch.Tensor], Outline]:
    """Return the tensors of a nested value, by name, and the outline that `unflatten_state` needs with them.

    Raises CheckpointError for a value that fits neither, naming `what` and the path to the value.
    """
    tensors: dict[str, torch.Tensor] = {}
    names: dict[tuple[object, ...], str] = {}  # by memory

    def outline(value: object, path: tuple[object, ...]) -> Outline:
        if isinstance(value, torch.Tensor):
            return {"tensor": _add_tensor(value, path, what, tensors, names)}
        if type(value) in SCALARS:
            return value
        kind = CONTAINERS.get(type(value), "")
        if isinstance(value, dict) and kind:
            for key in value:
                if type(key) not in SCALARS:
                    raise _unsupported(what, (*path, key), f"has a key of type {type(key).__name__}")
            return {"dict": [[key, outline(one, (*path, key))] for key, one in value.items()]}
        if isinstance(value, list | tuple) and kind:
            return {kind: [outline(one, (*path, number)) for number, one in enumerate(value)]}
        raise _unsupported(what, path, f"is of type {type(value).__module__}.{type(value).__qualname__}")

    return tensors, outline(value, ())


def unflatten_state(outline: Outline, tensors: dict[str, torch.Tensor]) -> Any:
    """Return the value that `flatten_state` split into `tensors` and `outline`."""
    if not isinstance(outline, dict):
        return outline
    ((kind, content),) = outline.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: unflatten_state(one, tensors) for key, one in content}
    parts = [unflatten_state(one, tensors) for one in content]
    return parts if kind == "list" else tuple(parts)


def check_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise CheckpointError, naming the entry, where a checkpoint cannot hold the model's or the optimizer's state."""
    base = torch.nn.Module
    for name, module in model.named_modules():
        kept = type(module).get_extra_state is not base.get_extra_state
        if kept and type(module).set_extra_state is base.set_extra_state:
            raise CheckpointError(
                f"the model cannot be checkpointed: {type(module).__name__} ({name or 'the model itself'}) has "
                "get_extra_state, but no set_extra_state, so that no run could resume from it"
            )
    flatten_state(model.state_dict(), "the model")
    flatten_state(optimizer.state_dict(), "the optimizer")


def _add_tensor(
    tensor: torch.Tensor,
    path: tuple[object, ...],
    what: str,
    tensors: dict[str, torch.Tensor],
    names: dict[tuple[object, ...], str],
) -> str:
    """Add a tensor whose memory is not stored yet. Return the name under which its memory is stored."""
    if torch.nn.parameter.is_lazy(tensor):
        raise _unsupported(what, path, "has no size before the model is called once")
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized or not _serializable(tensor.dtype):
        raise _unsupported(what, path, f"is a tensor of {tensor.dtype}, {tensor.layout}, on {tensor.device}")
    memory = (
        tensor.device,
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )
    if tensor.numel() and memory in names:
        return names[memory]
    name = plain = ".".join(map(str, path))
    number = 1
    while name in tensors:  # "a.b", and b of a
        number += 1
        name = f"{plain}#{number}"
    tensors[name] = tensor
    names[memory] = name
    return name


@lru_cache
def _serializable(dtype: torch.dtype) -> bool:
    try:
        save({"none": torch.empty(0, dtype=dtype)})
    except (SafetensorError, KeyError, ValueError, RuntimeError):
        return False
    return True


def _unsupported(what: str, path: tuple[object, ...], why: str) -> CheckpointError:
    place = repr(path[0]) + "".join(f"[{key!r}]" for key in path[1:]) if path else "its state"
    return CheckpointError(
        f"{what} cannot be checkpointed: {place} {why}; a checkpoint holds dense tensors, None, bool, int, float, str, "
        "and lists, tuples and dicts of them"
    )
