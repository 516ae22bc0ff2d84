"""Collectives of plain tensors that are carried out again: found by address and length, without checks or planning.

    first time   check ─▶ plan ─▶ prepare ─▶ start_and_keep ─▶ play     tens of microseconds of Python
    later        start_ready ──────────────────────────────▶ play     one or two

What is kept are addresses, so it is played only on tensors that lie there. `allreduce.py`, whose calls are the
shortest, looks it up by itself; its plays also hold views of shared memory.
"""

from __future__ import annotations

from typing import Any

import torch

from unisono.collectives.group import Group
from unisono.collectives.payload import is_plain
from unisono.transports.plan import Play

MAX_READY = 1024
"""Largest number of collectives that a group keeps."""

Key = tuple[Any, ...]
"""All that determines a collective: its name and parameters, and the addresses, lengths and dtypes of its tensors."""


def start_ready(group: Group, parameters: Key, *tensors: torch.Tensor) -> bool:
    """Carry a collective out on tensors for which it is kept, and return True; else return False."""
    play = group.ready.get(_key_of(parameters, tensors))
    if play is None:
        return False
    _carry_out(group, play, tensors)
    return True


def start_and_keep(group: Group, parameters: Key, play: Play, *tensors: torch.Tensor) -> None:
    """Carry a checked collective out by `play`, and keep it for later calls. The tensors are plain."""
    keep_ready(group, _key_of(parameters, tensors), play)
    _carry_out(group, play, tensors)


def keep_ready(group: Group, key: Key, play: Play) -> None:
    """Keep a prepared collective for later calls; the other ones are dropped where there are too many."""
    if len(group.ready) == MAX_READY:
        group.ready.clear()
    group.ready[key] = play


def _key_of(parameters: Key, tensors: tuple[torch.Tensor, ...]) -> Key:
    """Return the key of a collective; an empty one, for which nothing is kept, unless the tensors are plain."""
    key = [*parameters]
    for tensor in tensors:
        if not (tensor.is_cpu and tensor.layout is torch.strided and is_plain(tensor)):
            return ()
        key += tensor.data_ptr(), tensor.numel(), tensor.dtype
    return tuple(key)


def _carry_out(group: Group, play: Play, tensors: tuple[torch.Tensor, ...]) -> None:
    try:
        play()
    except BaseException:  # other ranks may still write into them, whatever has ended the wait
        group.keep_alive_if_pending(*tensors)
        raise
