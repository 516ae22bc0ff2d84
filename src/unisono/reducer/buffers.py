"""Floating-point buffers (running means of batch norm) are rank 0's: all ranks begin each step with the same.

    rank 0   running_mean ─ pack ─▶ │ mean │ var │ 1 1 │ ─┐ broadcast, beside the bucket that fills last
    rank 1                          │ mean │ var │ 1 1 │ ◀┘ ─ unpack ─▶ running_mean, before anybody reads it

They travel as bytes: no weight, no wire rounds them. A flag for each says whether it still has the shape and dtype that
it had when the model was made parallel; one that has not is each rank's own. So are integer buffers, which count.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch.nn.modules.batchnorm import _NormBase

ALIGNMENT = 64


class Slot(NamedTuple):
    """A buffer and its place."""

    owner: weakref.ref[torch.nn.Module]
    """The module, which may be the model: it is not kept alive."""
    name: str
    place: torch.Tensor
    """A view of what travels, with the buffer's shape and dtype."""

    def current(self) -> torch.Tensor | None:
        """Return the module's buffer of today, unless it has changed its form. Nobody is waited for."""
        module = self.owner()
        buffer: torch.Tensor | None = None if module is None else dict.get(module._buffers, self.name)
        alike = buffer is not None and (buffer.shape, buffer.dtype) == (self.place.shape, self.place.dtype)
        return buffer if alike else None


class Buffers:
    """The floating-point buffers of a model, and room for them to travel in."""

    def __init__(self, model: torch.nn.Module) -> None:
        found = [(name, one) for name, one in model.named_buffers() if one.is_floating_point() or one.is_complex()]
        starts, total = list[int](), 0
        for _, buffer in found:
            starts.append(total)
            total += -(-buffer.numel() * buffer.itemsize // ALIGNMENT) * ALIGNMENT
        self.flat = torch.zeros(total + len(found), dtype=torch.uint8)
        """What travels."""
        self._flags = self.flat[total:]
        self.slots: list[Slot] = []
        for (path, buffer), start in zip(found, starts, strict=True):
            place = self.flat[start : start + buffer.numel() * buffer.itemsize].view(buffer.dtype).view(buffer.shape)
            parent, _, name = path.rpartition(".")
            self.slots.append(Slot(weakref.ref(model.get_submodule(parent)), name, place))

    def pack(self) -> None:
        """Put the buffers into their places: rank 0 does."""
        with torch.no_grad():
            for number, slot in enumerate(self.slots):
                buffer = slot.current()
                self._flags[number] = buffer is not None
                if buffer is not None:
                    slot.place.copy_(buffer)

    def unpack(self) -> None:
        """Give the buffers what has come. Autograd sees it, so that a graph that needs the old values says so.

        Norms are excepted: in training their backward pass does not read the running means, and several graphs of one
        norm are common. In eval mode they do not change.
        """
        with torch.no_grad():
            for slot, there in zip(self.slots, self._flags.tolist(), strict=True):
                buffer = slot.current()
                if not there or buffer is None:
                    continue
                if isinstance(slot.owner(), _NormBase):
                    buffer.data.copy_(slot.place)
                elif not torch.equal(buffer, slot.place):
                    buffer.copy_(slot.place)
