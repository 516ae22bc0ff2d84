"""Keys of a store: integers, one at a time with a tensor, or several with a tensor each."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from operator import index

import torch

from unisono.errors import UsageError

Keys = int | Sequence[int]
"""Key, or several."""

Tensors = torch.Tensor | Sequence[torch.Tensor]
"""Tensor of a key, or one for each of several keys."""


def pair_keys(keys: Keys, tensors: Tensors) -> list[tuple[int, torch.Tensor]]:
    """Return each key with its tensor. Raises UsageError unless there is one for each."""
    if isinstance(keys, int | Integral) and isinstance(tensors, torch.Tensor):
        return [(index(keys), tensors)]
    if isinstance(keys, str | int | Integral) or isinstance(tensors, torch.Tensor):
        raise UsageError(
            f"keys are {keys!r} and tensors a {type(tensors).__name__}: give one integer and one tensor, or a list of "
            "each"
        )
    if len(keys) != len(tensors):
        raise UsageError(f"{len(keys)} keys {list(keys)} have {len(tensors)} tensors: give one for each key")
    for key, tensor in zip(keys, tensors, strict=True):
        if not isinstance(key, Integral):
            raise UsageError(f"key {key!r} is a {type(key).__name__}: keys are integers")
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(
                f"key {key} has a {type(tensor).__name__} in place of a tensor; for a weight without a gradient, push "
                "zeros, as all ranks must push the same keys"
            )
    return [(index(key), tensor) for key, tensor in zip(keys, tensors, strict=True)]


def key_numbers(keys: Keys) -> list[int]:
    """Return the keys, of which there may be one, as a list."""
    return [index(keys)] if isinstance(keys, int | Integral) else [index(key) for key in keys]
