"""Layers are PyTorch's own, exactly; they become so again; copies are plain layers."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from tests.reducer.weight_first.alike import however_small, taken
from torch import nn

from unisono.reducer.weight_first import restore
from unisono.reducer.weight_first.layers import CLASSES


class Own(nn.Linear):
    """Layer with a forward pass of its own."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) * 2


def layers() -> nn.Sequential:
    convolutions = [kind(2, 2, 3) for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)]
    return nn.Sequential(nn.Linear(2, 2), *convolutions, Own(2, 2), nn.ConvTranspose1d(2, 2, 3))


def test_layers_are_taken_by_their_exact_class_and_restored() -> None:
    model = layers()
    kinds, names, shown = [type(one) for one in model], list(model.state_dict()), repr(model)
    readings = taken(model)
    assert [type(one) for one in model] == [CLASSES.get(kind, kind) for kind in kinds]
    assert type(model[4]) is Own
    assert list(model.state_dict()) == names
    assert repr(model) == shown
    other = taken(nn.Sequential())
    restore(model, other)
    assert type(model[0]) is not nn.Linear, "the readings of another reducer"
    restore(model, readings)
    assert [type(one) for one in model] == kinds
    assert not any("readings" in vars(one) for one in model)


def test_copies_have_the_order_of_pytorch() -> None:
    model, inputs = nn.Sequential(nn.Linear(2, 2)), torch.ones(3, 2, requires_grad=True)
    taken(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with however_small():
        assert "_GradWeight" in model(inputs).grad_fn.name()
        for one in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert one(inputs).grad_fn.name() == "AddmmBackward0"


def test_a_functional_call_has_the_order_of_pytorch() -> None:
    model, inputs = nn.Sequential(nn.Linear(2, 2)), torch.ones(3, 2, requires_grad=True)
    taken(model)
    weights = {name: one.detach().clone().requires_grad_() for name, one in model.named_parameters()}
    with however_small():
        found = torch.func.functional_call(model, weights, (inputs,))
    assert found.grad_fn.name() == "AddmmBackward0"


def test_a_compiled_model_is_left_unchanged() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.compile(backend="eager")
    taken(model)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_model_may_be_compiled_later(fullgraph: bool) -> None:
    model, inputs = nn.Sequential(nn.Linear(2, 2), nn.Conv1d(3, 2, 1)), torch.ones(3, 2, requires_grad=True)
    own = copy.deepcopy(model)
    taken(model)
    with however_small():
        found = torch.compile(model, backend="eager", fullgraph=fullgraph)(inputs)
    assert torch.equal(found, own(inputs))
