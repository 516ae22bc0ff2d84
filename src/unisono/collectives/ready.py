"""Collectives of plain tensors that are carried out again: found by address and length, without checks or planning.

    first time   check ─▶ plan ─▶ prepare ─▶ start_and_keep ─▶ play     tens of microseconds of Python
    later        start_ready ──────────────────────────────▶ play     a few tenths of one

What is kept for addresses is played only on tensors that lie there; what copies its input and its output, or sends from
any memory, is kept for a length and a dtype, and so for the new tensors of each step, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from unisono.collectives.checks import check_tensors
from unisono.collectives.payload import is_plain
from unisono.transports.compiled import compiled
from unisono.transports.plan import Play, PlayAnywhere

if TYPE_CHECKING:
    from unisono.collectives.group import Group

MAX_READY = 1024

Key = tuple[Any, ...]
"""All that determines a collective: its name and parameters, and the addresses, lengths and dtypes of its tensors."""


class ReadyInPython:
    """Plays of collectives that were carried out, by all that determines them; the compiled `Ready` does the same."""

    def __init__(self, largest: int) -> None:
        self._largest, self._plays = largest, dict[Key, Play]()
        self._starts = dict[Key, Callable[[int, int], None]]()

    def __len__(self) -> int:
        return len(self._plays)

    def play(self, parameters: Key, *tensors: torch.Tensor) -> bool:
        """Carry out what is kept for tensors, and return True; else return False."""
        if not (key := _key_of(parameters, tensors)):
            return False
        if (play := self._plays.get(key)) is not None:
            play()
            return True
        start = self._starts.get(_key_of(parameters, tensors, addressed=False))
        if start is not None:
            start(tensors[0].data_ptr(), tensors[-1].data_ptr())
        return start is not None

    def add(self, parameters: Key, play: Play, *tensors: torch.Tensor) -> None:
        """Keep the play of plain tensors; of too many, all others are dropped."""
        if len(self._plays) == self._largest:
            self._plays.clear()
        if key := _key_of(parameters, tensors):
            self._plays[key] = play

    def add_anywhere(self, parameters: Key, start: Callable[[int, int], None], *tensors: torch.Tensor) -> None:
        """Keep a function of the first and the last one's address for all plain tensors of these lengths, dtypes."""
        if len(self._starts) == self._largest:
            self._starts.clear()
        if key := _key_of(parameters, tensors, addressed=False):
            self._starts[key] = start

    def clear(self) -> None:
        self._plays.clear()
        self._starts.clear()


Ready: Any = getattr(compiled, "Ready", ReadyInPython)


def start_ready(group: Group, parameters: Key, *tensors: torch.Tensor) -> bool:
    """Carry a collective out on tensors for which it is kept, and return True; else return False.

    Raises TensorError for what is no tensor.
    """
    try:
        if group.ready.play(parameters, *tensors):
            return True
    except BaseException:  # whatever has ended the wait
        group.interrupt(*tensors)
        raise
    check_tensors(group, parameters[0], *tensors)
    return False


def start_and_keep(
    group: Group,
    parameters: Key,
    play: Play,
    *tensors: torch.Tensor,
    checked_anywhere: bool = True,
    anywhere: Callable[[int, int], None] | None = None,
) -> None:
    """Carry a checked collective out by `play`, and keep it for later calls. The tensors are plain.

    `checked_anywhere` is true if tensors at other addresses pass the same checks; `anywhere` carries the collective out
    on those where `play` cannot.
    """
    if checked_anywhere and isinstance(play, PlayAnywhere):
        anywhere = play.func
    if anywhere is not None:
        group.ready.add_anywhere(parameters, anywhere, *tensors)
    if anywhere is None or len(tensors) == 1:  # a single tensor that comes again is found faster by its address
        group.ready.add(parameters, play, *tensors)
    carry_out(group, play, *tensors)


def carry_out(group: Group, play: Play, *tensors: torch.Tensor) -> None:
    """Carry a checked collective out on these tensors."""
    try:
        play()
    except BaseException:  # as above
        group.interrupt(*tensors)
        raise


def _key_of(parameters: Key, tensors: tuple[torch.Tensor, ...], addressed: bool = True) -> Key:
    """Return the key of a collective; an empty one, for which nothing is kept, unless the tensors are plain."""
    key = [*parameters]
    for tensor in tensors:
        if not (isinstance(tensor, torch.Tensor) and tensor.is_cpu and tensor.layout is torch.strided):
            return ()
        if not is_plain(tensor) or (tensor.numel() and not tensor.data_ptr()):  # a wrapper of other tensors
            return ()
        key += tensor.data_ptr() if addressed else None, tensor.numel(), tensor.dtype
    return tuple(key)
