"""Floating-point buffers (running means of batch norm), broadcast from rank 0 in each step, or at averages of weights.

    rank 0   running_mean ─ pack ─▶ │ mean │ var │ 1 1 │ ─┐ broadcast, beside the bucket that fills last
    rank 1                          │ mean │ var │ 1 1 │ ◀┘ ─ unpack ─▶ running_mean, before it is read

They are sent as bytes: no weight and no wire format rounds them. A flag for each is set where the buffer still has the
shape and dtype of when the model was made parallel; otherwise each rank keeps its own. Integer buffers, which count,
are also each rank's own. Those on a device are gathered there, and copied to the host by one copy.
"""

from __future__ import annotations

import weakref
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.nn.modules.batchnorm import _NormBase

from unisono.device import CopyStreams, device_of, host_memory
from unisono.processor import HOST
from unisono.reducer.bucket_memory import distinct

ALIGNMENT = 64


class BufferSlot(NamedTuple):
    """Buffer of a module, and its place in the memory that is sent."""

    owner: weakref.ref[torch.nn.Module]
    """Module of the buffer, possibly the model itself. It is not kept alive."""
    name: str
    sent: torch.Tensor
    """View of the memory that is sent, or of that like it on a device, with the buffer's shape and dtype."""
    start: int
    """First byte of it."""

    def current(self) -> torch.Tensor | None:
        """Return the module's present buffer; None where its shape or dtype has changed. Nothing is waited for."""
        module = self.owner()
        buffer: torch.Tensor | None = None if module is None else dict.get(module._buffers, self.name)
        alike = buffer is not None and (buffer.shape, buffer.dtype) == (self.sent.shape, self.sent.dtype)
        return buffer if alike else None


class Buffers:
    """Floating-point buffers of a model, and memory to send them in."""

    def __init__(self, model: torch.nn.Module) -> None:
        named = [
            (name, buffer)
            for name, buffer in model.named_buffers()
            if buffer.is_floating_point() or buffer.is_complex()
        ]
        buffers = [buffer for _, buffer in named]
        lines = (-(-buffer.numel() * buffer.itemsize // ALIGNMENT) for buffer in buffers)
        *starts, total = (ALIGNMENT * line for line in accumulate(lines, initial=0))
        device = device_of(buffers, "the buffers of a model") if buffers else torch.device(HOST)
        self._streams = None if device.type == HOST else CopyStreams(device)
        self._arrived: Any = None
        length = total + len(buffers)  # the buffers, then their flags
        self._flat = torch.zeros(length, dtype=torch.uint8, device="cpu")
        self._values = self._flat[:total]
        if self._streams is not None:
            self._flat = host_memory(length, torch.uint8, device).zero_()
            self._values = torch.zeros(total, dtype=torch.uint8, device=device)
        self._flags = self._flat[total:]
        self.slots: list[BufferSlot] = []
        for (path, buffer), start in zip(named, starts, strict=True):
            sent = self._values[start : start + buffer.numel() * buffer.itemsize].view(buffer.dtype).view(buffer.shape)
            parent, _, name = path.rpartition(".")
            self.slots.append(BufferSlot(weakref.ref(model.get_submodule(parent)), name, sent, start))

    @property
    def flat(self) -> torch.Tensor:
        """Memory that is sent, in uint8, once what was packed has arrived there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._flat

    def pack(self) -> None:
        """Copy the buffers to their places, and set their flags. Only rank 0's are sent."""
        pairs = list[tuple[torch.Tensor, torch.Tensor]]()
        for index, slot in enumerate(self.slots):
            buffer = slot.current()
            self._flags[index] = buffer is not None
            if buffer is not None:
                pairs.append((slot.sent, buffer))
        with torch.no_grad():
            if self._streams is None:
                for sent, buffer in pairs:
                    sent.copy_(buffer)
            elif pairs:
                torch._foreach_copy_([sent for sent, _ in pairs], [buffer for _, buffer in pairs])
                self._flat[: len(self._values)].copy_(self._values, non_blocking=True)
                self._arrived = self._streams.record()

    def move(self, buffers: torch.Tensor, targets: torch.Tensor, share: float) -> None:
        """Move buffers, in the form in which they are sent, by a share of the difference to `targets`, in place."""
        for slot in self.slots:
            here = slice(slot.start, slot.start + slot.sent.numel() * slot.sent.itemsize)
            values, target_values = (flat[here].view(slot.sent.dtype) for flat in (buffers, targets))
            step = (target_values - values).mul_(share)
            values.add_(step.masked_fill_(target_values == values, 0))  # an infinity less itself is NaN

    def unpack(self) -> None:
        """Copy the received values to the buffers. Autograd sees it: a graph that needs the old values raises an error.

        Norms are excepted, as several graphs of one are common. A graph of eval mode reads the running means: where a
        graph has kept a buffer, that stays as it is, and the norm gets another.
        """
        norms = list[tuple[torch.Tensor, torch.Tensor]]()
        with torch.no_grad():
            if self._streams is not None:
                self._values.copy_(self.flat[: len(self._values)], non_blocking=True)
                self._arrived = self._streams.record()
            for slot, present in zip(self.slots, self._flags.tolist(), strict=True):
                buffer, owner = slot.current(), slot.owner()
                if not present or buffer is None:
                    continue
                if isinstance(owner, _NormBase) and buffer._use_count() == 1:  # type: ignore[attr-defined]
                    norms.append((buffer.data, slot.sent))
                elif torch.equal(buffer, slot.sent):
                    continue
                elif isinstance(owner, _NormBase):
                    with torch.inference_mode(False):  # training goes on with it, whoever waits first
                        dict.__setitem__(owner._buffers, slot.name, slot.sent.clone())
                else:
                    own = distinct(buffer)
                    own.copy_(slot.sent[tuple(map(slice, own.shape))])
            if norms:
                torch._foreach_copy_([buffer for buffer, _ in norms], [sent for _, sent in norms])
