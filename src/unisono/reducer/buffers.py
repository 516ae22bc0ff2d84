"""Floating-point buffers (running means of batch norm), broadcast from rank 0: all ranks begin each step with the same.

    rank 0   running_mean ─ pack ─▶ │ mean │ var │ 1 1 │ ─┐ broadcast, beside the bucket that fills last
    rank 1                          │ mean │ var │ 1 1 │ ◀┘ ─ unpack ─▶ running_mean, before it is read

They are sent as bytes: no weight and no wire format rounds them. A flag for each is set where the buffer still has the
shape and dtype of when the model was made parallel; otherwise each rank keeps its own. Integer buffers, which count,
are also each rank's own.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch.nn.modules.batchnorm import _NormBase

ALIGNMENT = 64


class BufferSlot(NamedTuple):
    """Buffer of a module, and its place in the memory that is sent."""

    owner: weakref.ref[torch.nn.Module]
    """Module of the buffer, possibly the model itself. It is not kept alive."""
    name: str
    sent: torch.Tensor
    """View of the memory that is sent, with the buffer's shape and dtype."""

    def current(self) -> torch.Tensor | None:
        """Return the module's present buffer; None where its shape or dtype has changed. Nothing is waited for."""
        module = self.owner()
        buffer: torch.Tensor | None = None if module is None else dict.get(module._buffers, self.name)
        alike = buffer is not None and (buffer.shape, buffer.dtype) == (self.sent.shape, self.sent.dtype)
        return buffer if alike else None


class Buffers:
    """Floating-point buffers of a model, and memory to send them in."""

    def __init__(self, model: torch.nn.Module) -> None:
        found = [(name, one) for name, one in model.named_buffers() if one.is_floating_point() or one.is_complex()]
        starts, total = list[int](), 0
        for _, buffer in found:
            starts.append(total)
            total += -(-buffer.numel() * buffer.itemsize // ALIGNMENT) * ALIGNMENT
        self.flat = torch.zeros(total + len(found), dtype=torch.uint8)
        """Memory that is sent, in uint8: the buffers, then their flags."""
        self._flags = self.flat[total:]
        self.slots: list[BufferSlot] = []
        for (path, buffer), start in zip(found, starts, strict=True):
            sent = self.flat[start : start + buffer.numel() * buffer.itemsize].view(buffer.dtype).view(buffer.shape)
            parent, _, name = path.rpartition(".")
            self.slots.append(BufferSlot(weakref.ref(model.get_submodule(parent)), name, sent))

    def pack(self) -> None:
        """Copy the buffers to their places, and set their flags. Only rank 0's are sent."""
        with torch.no_grad():
            for number, slot in enumerate(self.slots):
                buffer = slot.current()
                self._flags[number] = buffer is not None
                if buffer is not None:
                    slot.sent.copy_(buffer)

    def move(self, mine: torch.Tensor, other: torch.Tensor, share: float) -> None:
        """Move buffers, in the form in which they are sent, by a share of the difference towards others, in place."""
        for slot in self.slots:
            start = slot.sent.data_ptr() - self.flat.data_ptr()
            here = slice(start, start + slot.sent.numel() * slot.sent.itemsize)
            one, its = (flat[here].view(slot.sent.dtype) for flat in (mine, other))
            one.add_((its - one).mul_(share))

    def unpack(self) -> None:
        """Copy the received values to the buffers. Autograd sees it: a graph that needs the old values raises an error.

        Norms are excepted: in training their backward pass does not read the running means, and several graphs of one
        norm are common. In eval mode they do not change.
        """
        with torch.no_grad():
            for slot, there in zip(self.slots, self._flags.tolist(), strict=True):
                buffer = slot.current()
                if not there or buffer is None:
                    continue
                if isinstance(slot.owner(), _NormBase):
                    buffer.data.copy_(slot.sent)
                elif not torch.equal(buffer, slot.sent.to(buffer.device)):
                    buffer.copy_(slot.sent)
