"""Copies of a device's tensors in the memory of the host: they live as long as the call."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from unisono.collectives import staged


def test_a_call_with_copies_keeps_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged, "is_on_host", lambda _: False)
    monkeypatch.setattr(staged, "host_memory", lambda length, dtype, _: torch.empty(length, dtype=dtype))
    copies: list[weakref.ref[torch.Tensor]] = []

    def add_one(written: torch.Tensor, inputs: list[torch.Tensor]) -> None:
        copies.extend(map(weakref.ref, [written, *inputs]))
        written.add_(1)

    tensor, other = torch.zeros(5), torch.zeros(3)
    tensors = [weakref.ref(tensor), weakref.ref(other)]
    gc.disable()
    try:
        staged.call_with_copies(add_one, (tensor, [other]), [tensor])
        assert tensor.tolist() == [1] * 5
        del tensor, other
        assert [reference() for reference in (*tensors, *copies)] == [None] * 4
    finally:
        gc.enable()
