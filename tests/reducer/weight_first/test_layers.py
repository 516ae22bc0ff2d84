"""Layers are PyTorch's own, exactly; they become so again; copies are plain layers."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from tests.reducer.weight_first.alike import however_small, taken
from torch import nn

from unisono.reducer.weight_first import restore
from unisono.reducer.weight_first.layers import KINDS


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
    own = [set(vars(one)) for one in model]
    readings = taken(model)
    assert [set(vars(one)) - before for one, before in zip(model, own, strict=True)] == [
        {KINDS[kind].replaces} if kind in KINDS else set() for kind in kinds
    ]
    assert [type(one) for one in model] == kinds
    assert list(model.state_dict()) == names
    assert repr(model) == shown
    other = taken(nn.Sequential())
    restore(model, other)
    assert "forward" in vars(model[0]), "the readings of another reducer"
    restore(model, readings)
    assert [set(vars(one)) for one in model] == own


def test_a_method_of_the_program_stays() -> None:
    layer = nn.Linear(2, 2)
    vars(layer)["forward"] = torch.zeros_like
    readings = taken(layer)
    assert layer(torch.ones(3)).tolist() == [0, 0, 0]
    restore(layer, readings)
    assert layer.forward is torch.zeros_like


def test_a_layer_that_is_taken_twice_reports_to_the_later() -> None:
    layer = nn.Linear(2, 2)
    first, later = taken(layer), taken(layer)
    restore(layer, first)
    assert "forward" in vars(layer)
    restore(layer, later)
    assert "forward" not in vars(layer)


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
    assert "forward" not in vars(model[0])


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_model_may_be_compiled_later(fullgraph: bool) -> None:
    model, inputs = nn.Sequential(nn.Linear(2, 2), nn.Conv1d(3, 2, 1)), torch.ones(3, 2, requires_grad=True)
    own = copy.deepcopy(model)
    taken(model)
    with however_small():
        found = torch.compile(model, backend="eager", fullgraph=fullgraph)(inputs)
    assert torch.equal(found, own(inputs))


def convolutions() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(2, 2, 1), nn.ReLU(), nn.Linear(2, 2))


def traced_by_fx(model: nn.Module, _: torch.Tensor) -> nn.Module:
    return torch.fx.symbolic_trace(model)


def traced_into_layers(model: nn.Module, _: torch.Tensor) -> nn.Module:
    class Inner(torch.fx.Tracer):
        def is_leaf_module(self, *_: object) -> bool:
            return False

    return torch.fx.GraphModule(model, Inner().trace(model))


def traced(model: nn.Module, inputs: torch.Tensor) -> nn.Module:
    return torch.jit.trace(model, inputs)


def scripted(model: nn.Module, _: torch.Tensor) -> nn.Module:
    return torch.jit.script(model)


def exported(model: nn.Module, inputs: torch.Tensor) -> nn.Module:
    return torch.export.export(model, (inputs,)).module()


@pytest.mark.filterwarnings("ignore:`torch.jit")  # programs still use it
@pytest.mark.parametrize("tool", [traced_by_fx, traced_into_layers, traced, scripted, exported])
def test_tools_of_pytorch_read_the_model(tool: Callable[[nn.Module, torch.Tensor], nn.Module]) -> None:
    model, inputs = convolutions(), torch.randn(3, 2, 2)
    wanted = model(inputs)
    taken(model)
    with however_small():
        assert torch.equal(tool(model, inputs)(inputs), wanted)


def test_a_layer_that_becomes_another_class_has_the_products_of_that_class() -> None:
    layer, inputs = nn.Linear(2, 2), torch.ones(3, 2, requires_grad=True)
    taken(layer)
    wanted = layer(inputs) * 2
    layer.__class__ = Own
    with however_small():
        assert torch.equal(layer(inputs), wanted)


@pytest.mark.filterwarnings("ignore:`torch.jit")  # programs still use it
@pytest.mark.skipif("x86" not in torch.backends.quantized.supported_engines, reason="quantized products of x86")
def test_linear_layers_can_be_quantized() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    taken(model)
    found = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert type(found[0]) is torch.ao.nn.quantized.dynamic.Linear
