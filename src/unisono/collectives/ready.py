"""Collectives of plain tensors that are carried out again: found by address and length, without checks or planning.

    first time   check ─▶ plan ─▶ prepare ─▶ start_and_keep ─▶ play     tens of microseconds of Python
    later        start_ready ──────────────────────────────▶ play     one or two

What is kept are addresses, so it is played only on tensors that lie there. `allreduce.py`, whose calls are the
shortest, has a form of its own, whose plays also hold views of shared memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from unisono.collectives.group import Group
from unisono.collectives.payload import is_plain

MAX_READY = 256
"""Largest number of collectives that are kept for one set of parameters, and of allreduces."""

Parameters = tuple[object, ...]
"""Name of a collective, and all that determines it beside its tensors."""


def start_ready(group: Group, parameters: Parameters, *tensors: torch.Tensor) -> bool:
    """Carry a collective out on tensors for which it is kept, and return True; else return False."""
    kept = group.ready.get(parameters)
    if kept is None or not all(map(_is_plain_memory, tensors)):
        return False
    play = kept.get(_place_of(tensors))
    if play is None:
        return False
    _carry_out(group, play, tensors)
    return True


def start_and_keep(group: Group, parameters: Parameters, play: Callable[[], None], *tensors: torch.Tensor) -> None:
    """Carry a checked collective out by `play`, and keep it for later calls. The tensors are plain."""
    kept = group.ready.setdefault(parameters, {})
    if len(kept) == MAX_READY:
        kept.clear()
    kept[_place_of(tensors)] = play
    _carry_out(group, play, tensors)


def _is_plain_memory(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.layout is torch.strided and is_plain(tensor)


def _place_of(tensors: tuple[torch.Tensor, ...]) -> tuple[object, ...]:
    return tuple([place for tensor in tensors for place in (tensor.data_ptr(), tensor.numel(), tensor.dtype)])


def _carry_out(group: Group, play: Callable[[], None], tensors: tuple[torch.Tensor, ...]) -> None:
    try:
        play()
    except BaseException:  # other ranks may still write into them, whatever has ended the wait
        group.keep_alive_if_pending(*tensors)
        raise
