"""Hooks of parameters: one call for each complete gradient."""

from __future__ import annotations

import gc
import weakref

import torch

from unisono.reducer.gradient_hooks import register_hooks


class Record:
    """Receiver of complete gradients."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, bool]] = []

    def mark_ready(self, number: int, last: bool) -> None:
        self.calls.append((number, last))


def test_each_complete_gradient_is_reported_once() -> None:
    model, record = torch.nn.Linear(2, 2), Record()
    handles = register_hooks(list(model.parameters()), record.mark_ready)
    (model(torch.ones(1, 2)).sum() + model(torch.zeros(1, 2)).sum()).backward()
    assert sorted(record.calls) == [(0, True), (1, True)]
    for handle in handles:
        handle.remove()
    model(torch.ones(1, 2)).sum().backward()
    assert len(record.calls) == 2


def test_hooks_of_the_program_that_follow_are_seen() -> None:
    model, record = torch.nn.Linear(2, 2), Record()
    model.weight.register_post_accumulate_grad_hook(lambda _: None)
    register_hooks(list(model.parameters()), record.mark_ready)
    model.bias.register_post_accumulate_grad_hook(lambda _: None)
    model(torch.ones(1, 2)).sum().backward()
    assert sorted(record.calls) == [(0, True), (1, False)]


def test_they_do_not_keep_the_receiver_alive() -> None:
    model, record = torch.nn.Linear(2, 2), Record()
    register_hooks(list(model.parameters()), record.mark_ready)
    reference = weakref.ref(record)
    gc.disable()
    try:
        del record
        assert reference() is None
    finally:
        gc.enable()
    model(torch.ones(1, 2)).sum().backward()
