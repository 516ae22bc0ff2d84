from __future__ import annotations

import pytest
import torch
from torch import nn

from unisono.reducer.buffers import Buffers


class Mixed(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.norm.running_mean.fill_(value)
        self.register_buffer("wide", torch.full((2, 2), value, dtype=torch.float64).t())
        self.register_buffer("small", torch.full((5,), value, dtype=torch.bfloat16), persistent=False)
        self.register_buffer("count", torch.tensor(int(value)))
        self.register_buffer("none", None)
        self.shared = self.norm


def send(source: nn.Module, target: nn.Module) -> None:
    sender, receiver = Buffers(source), Buffers(target)
    sender.pack()
    receiver.flat.copy_(sender.flat)
    receiver.unpack()


def test_floating_point_buffers_are_sent_bit_for_bit_and_integers_are_not() -> None:
    source, target = Mixed(1 / 3), Mixed(7)
    source.wide[0, 0] = float("nan")
    send(source, target)
    for name, buffer in target.named_buffers():
        if buffer.is_floating_point():
            assert torch.equal(buffer.nan_to_num(9), dict(source.named_buffers())[name].nan_to_num(9))
    assert target.count == 7
    assert torch.equal(Mixed(7).small, torch.full((5,), 7.0).bfloat16())


@pytest.mark.parametrize("changed", [torch.zeros(3, 3, dtype=torch.float64), torch.zeros(2, 2)])
@pytest.mark.parametrize("at", ["source", "target"])
def test_a_buffer_of_another_shape_or_dtype_is_not_sent(changed: torch.Tensor, at: str) -> None:
    source, target = Mixed(1), Mixed(7)
    sender, receiver = Buffers(source), Buffers(target)
    (source if at == "source" else target).wide = changed
    before = target.wide.clone()
    sender.pack()
    receiver.flat.copy_(sender.flat)
    receiver.unpack()
    assert torch.equal(target.wide, before)
    assert torch.equal(target.norm.running_mean, torch.ones(3))


def test_a_replaced_buffer_is_sent() -> None:
    source, target = Mixed(1), Mixed(7)
    sender, receiver = Buffers(source), Buffers(target)
    source.wide, target.wide = source.wide * 5, target.wide + 1
    sender.pack()
    receiver.flat.copy_(sender.flat)
    receiver.unpack()
    assert target.wide.tolist() == [[5.0, 5.0], [5.0, 5.0]]


def test_buffers_move_towards_others_and_equal_infinities_stay() -> None:
    """A mask of attention has infinities, and buffers that count none."""
    source, target = Mixed(1), Mixed(5)
    source.wide[0, 0] = target.wide[0, 0] = float("-inf")
    own, others = Buffers(source), Buffers(target)
    own.pack()
    others.pack()
    own.move(own.flat, others.flat, 0.5)
    own.unpack()
    assert source.wide.tolist() == [[float("-inf"), 3.0], [3.0, 3.0]]
    assert torch.equal(source.norm.running_mean, torch.full((3,), 3.0))


def test_a_graph_that_needs_the_old_value_raises_and_one_of_a_norm_does_not() -> None:
    source, target = Mixed(1), Mixed(7)
    weight = torch.ones(2, 2, dtype=torch.float64, requires_grad=True)
    loss = (weight * target.wide).sum()
    normed = target.norm(torch.arange(6.0, requires_grad=True).view(2, 3)).square().sum()
    send(source, target)
    normed.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    loss = (weight * target.wide).sum()
    send(source, target)  # nothing has changed
    loss.backward()


def test_a_graph_of_a_norm_in_eval_mode_has_the_old_value() -> None:
    source, target = Mixed(1), Mixed(7)
    inputs = torch.arange(6.0).view(2, 3)
    (expected,) = torch.autograd.grad(target.eval().norm(inputs).square().sum(), target.norm.weight)
    loss = target.norm(inputs).square().sum()
    send(source, target)
    assert torch.equal(target.norm.running_mean, source.norm.running_mean)
    loss.backward()
    assert torch.equal(target.norm.weight.grad, expected)
    before = target.norm.running_mean
    source.norm.running_mean.fill_(5)
    send(source, target)
    assert target.norm.running_mean is before, "no graph has kept it"
    assert torch.equal(before, source.norm.running_mean)


def test_a_model_without_buffers() -> None:
    assert Buffers(nn.Linear(2, 2)).slots == []
