"""Layers that compute the weight gradient first: PyTorch's bits, their order, and all else that autograd does."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from unisono.reducer import weight_first
from unisono.reducer.weight_first import compute_weight_gradients_first, forget_unread, have_been_read

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])


def is_first(outputs: Tensor) -> bool:
    """Return True where the layer of these outputs computes its weight gradient first."""
    return outputs.grad_fn is not None and "_GradWeight" in outputs.grad_fn.name()


def results(layer: nn.Module, inputs: Tensor) -> list[Tensor | None]:
    """Return outputs and all gradients of a layer, whose outputs the next one changes in place."""
    leaf = inputs.clone().requires_grad_()
    outputs = layer(leaf * 1)
    original = outputs.detach().clone()
    scores = torch.linspace(-1, 1, outputs.numel(), dtype=torch.float64).view(outputs.shape)
    (outputs.relu_().double() * scores).sum().backward()
    return [original, leaf.grad, *(parameter.grad for parameter in layer.parameters())]


def assert_alike(layer: nn.Module, inputs: Tensor, first: bool = True) -> None:
    """Assert that a layer has PyTorch's outputs and gradients in every bit, with the weight gradient first or not."""
    own = copy.deepcopy(layer)
    assert compute_weight_gradients_first(layer) == 1
    assert is_first(layer(inputs.clone().requires_grad_())) == first
    for result, expected in zip(results(layer, inputs), results(own, inputs), strict=True):
        assert (result is None) == (expected is None)
        assert (
            result is None
            or expected is None
            or (torch.equal(result, expected) and result.stride() == expected.stride())
        )


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(1, 9), st.integers(1, 9), st.booleans(), DTYPES)
def test_a_linear_layer_has_the_bits_of_pytorch(
    shape: list[int], ins: int, outs: int, bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    assert_alike(nn.Linear(ins, outs, bias=bias, dtype=dtype), torch.randn(*shape, ins).to(dtype))


@pytest.mark.parametrize("order", itertools.permutations(range(3)))
def test_inputs_in_any_order_of_memory_have_the_bits_of_pytorch(order: Sequence[int]) -> None:
    torch.manual_seed(0)
    for sizes in itertools.product((1, 7, 33), repeat=3):
        inputs = torch.randn(sizes).permute(order)
        for batch in (inputs, inputs[0]):
            assert_alike(nn.Linear(batch.shape[-1], 64), batch)


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    """Options of a convolution that adds zeros on both sides alike."""
    chosen = {"kernel_size": draw(st.sampled_from([1, 2, 3, 5])), "padding": draw(st.integers(0, 2))}
    chosen |= {"stride": draw(st.integers(1, 3)), "dilation": draw(st.integers(1, 2))}
    return chosen | {"groups": draw(st.sampled_from([1, 2])), "bias": draw(st.booleans())}


@given(st.sampled_from(sorted(CONVOLUTIONS)), options(), st.integers(1, 3), DTYPES)
def test_a_convolution_has_the_bits_of_pytorch(
    dimensions: int, chosen: dict[str, Any], samples: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    layer = CONVOLUTIONS[dimensions](4, 6, dtype=dtype, **chosen)
    assert_alike(layer, torch.randn(samples, 4, *(10,) * dimensions).to(dtype))


def test_channels_last_stays() -> None:
    layer = nn.Conv2d(8, 16, 3, padding=1).to(memory_format=torch.channels_last)
    assert_alike(layer, torch.randn(2, 8, 6, 6).to(memory_format=torch.channels_last))


@pytest.mark.parametrize(
    ("layer", "inputs"),
    [
        (nn.Linear(3, 4), torch.ones(3)),
        (nn.Conv2d(4, 4, 3), torch.ones(4, 6, 6)),
        (nn.Conv2d(4, 4, 3), torch.ones(0, 4, 6, 6)),
        (nn.Conv2d(4, 4, 3, padding="same"), torch.ones(2, 4, 6, 6)),
        (nn.Conv1d(4, 4, 3, padding=1, padding_mode="circular"), torch.ones(2, 4, 6)),
    ],
    ids=["vector", "no batch dimension", "no samples", "same", "circular"],
)
def test_other_inputs_and_paddings_keep_pytorchs_order(layer: nn.Module, inputs: Tensor) -> None:
    assert_alike(layer, inputs, first=False)


@pytest.mark.parametrize("kind", [nn.Linear, lambda *size, **kinds: nn.Conv1d(*size, 1, **kinds)])
def test_complex_numbers_have_the_gradients_of_pytorch(kind: Callable[..., nn.Module]) -> None:
    layer, inputs = kind(3, 4, dtype=torch.complex64), torch.randn(2, 3, 3, dtype=torch.complex64, requires_grad=True)
    own = copy.deepcopy(layer)
    compute_weight_gradients_first(layer)
    for module in (layer, own):
        module(inputs).abs().square().sum().backward()
    assert torch.equal(layer.weight.grad, own.weight.grad)


class Doubled(nn.Parameter):
    """Weight with a product of its own: twice PyTorch's."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            outputs = function(*args, **(kwargs or {}))
        return 2 * outputs if function is functional.linear else outputs


class Watched(TorchFunctionMode):
    """Mode that sees the functions of PyTorch."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def first_linear() -> nn.Linear:
    layer = nn.Linear(3, 4)
    compute_weight_gradients_first(layer)
    return layer


INPUTS = torch.ones(2, 3, requires_grad=True)
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "function": Watched,
    "dispatch": lambda: FlopCounterMode(display=False),
    "autocast": lambda: torch.autocast("cpu"),
    "no grad": torch.no_grad,
    "forward mode": torch.autograd.forward_ad.dual_level,
}


@pytest.mark.parametrize("name", MODES)
def test_modes_keep_pytorchs_order(name: str) -> None:
    layer = first_linear()
    assert is_first(layer(INPUTS))
    with MODES[name]():
        assert not is_first(layer(INPUTS))


def test_tensors_that_need_no_gradient_or_have_their_own_keep_pytorchs_order() -> None:
    layer, wanted = first_linear(), 2 * nn.Linear(3, 4).weight.detach()
    assert not is_first(layer(INPUTS.detach())), "the first layer's input"
    other = {"weight": layer.weight.detach().requires_grad_() * 1}
    assert not is_first(torch.func.functional_call(layer, other, (INPUTS,))), "a weight that is computed"
    layer.weight = Doubled(wanted / 2)
    assert torch.equal(layer(INPUTS), 2 * functional.linear(INPUTS, wanted / 2, layer.bias))
    layer.weight = nn.Parameter(wanted, requires_grad=False)
    assert not is_first(layer(INPUTS))


@pytest.mark.filterwarnings("ignore:`torch.jit")  # programs still use it
@pytest.mark.parametrize(
    "tool",
    [
        lambda layer: torch.fx.symbolic_trace(nn.Sequential(layer)),
        lambda layer: torch.jit.trace(layer, INPUTS),
        lambda layer: torch.export.export(layer, (INPUTS,)).module(),
        lambda layer: torch.compile(layer, backend="eager", fullgraph=True),
        torch.func.vmap,
        copy.deepcopy,
        lambda layer: pickle.loads(pickle.dumps(layer)),
    ],
    ids=["fx", "trace", "export", "compile", "vmap", "copy", "pickle"],
)
def test_tools_read_the_layer(tool: Callable[[nn.Module], Callable[[Tensor], Tensor]]) -> None:
    layer = first_linear()
    wanted = layer(INPUTS)
    torch.testing.assert_close(tool(layer)(INPUTS), wanted)


class Own(nn.Linear):
    """Layer with a forward pass of its own."""


def test_layers_are_taken_by_their_exact_class() -> None:
    convolutions = [kind(2, 2, 3) for kind in CONVOLUTIONS.values()]
    model = nn.Sequential(nn.Linear(2, 2), *convolutions, Own(2, 2), nn.ConvTranspose1d(2, 2, 3))
    names = list(model.state_dict())
    assert compute_weight_gradients_first(model) == 4
    assert compute_weight_gradients_first(model) == 0
    assert [type(layer) for layer in model] == [*weight_first.KINDS.values(), Own, nn.ConvTranspose1d]
    assert list(model.state_dict()) == names


def two_layers(first: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 3)).double()
    if first:
        compute_weight_gradients_first(model)
    return model


def test_a_weight_is_ready_before_its_grad_input_which_reads_it_last(monkeypatch: pytest.MonkeyPatch) -> None:
    events, own = list[str](), weight_first.linear_gradients

    def recorded(*parts: Any) -> Any:
        if parts[-1][0]:
            events.append(f"grad input, read {have_been_read(model.parameters())}")
        return own(*parts)

    monkeypatch.setattr(weight_first, "linear_gradients", recorded)
    model = two_layers()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: events.append(f"{name}, read {have_been_read(model.parameters())}")
        )
    model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    assert sorted(events[:2]) == ["2.bias, read False", "2.weight, read False"]
    assert events[2] == "grad input, read False"
    assert sorted(events[3:]) == ["0.bias, read True", "0.weight, read True"], "the first layer has PyTorch's order"


def test_what_a_pass_leaves_unread_is_forgotten_by_weight() -> None:
    model, inputs = two_layers(), torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
    model(inputs).sum().backward(inputs=[model[2].weight])
    assert have_been_read([model[0].weight])
    assert not have_been_read(model.parameters())
    forget_unread([model[0].weight])
    assert not have_been_read([model[2].weight])
    forget_unread(model.parameters())
    assert have_been_read(model.parameters())


@pytest.mark.parametrize(("layer", "shape"), [(nn.Linear(4, 5), (3, 4)), (nn.Conv2d(2, 3, 3, padding=1), (2, 2, 4, 4))])
def test_first_and_second_gradients_are_right(layer: nn.Module, shape: tuple[int, ...]) -> None:
    compute_weight_gradients_first(layer.double())
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True)]
    leaves += [parameter.detach().clone().requires_grad_() for parameter in layer.parameters()]

    def function(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        outputs = torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (inputs * 2,))
        assert is_first(outputs)
        return outputs.tanh()

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


def test_a_gradient_is_not_copied_when_it_is_accumulated(monkeypatch: pytest.MonkeyPatch) -> None:
    own, made = weight_first.linear_gradients, list[int]()

    def recorded(*parts: Any) -> Any:
        gradients = own(*parts)
        made.extend(gradient.data_ptr() for gradient in gradients[1:2] if gradient is not None)
        return gradients

    monkeypatch.setattr(weight_first, "linear_gradients", recorded)
    layer = first_linear()
    layer(INPUTS).sum().backward()
    assert made == [layer.weight.grad.data_ptr()]


def test_a_weight_that_changes_before_its_grad_input_raises_an_error() -> None:
    layer = first_linear()

    def change(weight: Tensor) -> None:
        weight.detach().add_(1)

    layer.weight.register_post_accumulate_grad_hook(change)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        layer(INPUTS).sum().backward()
    forget_unread([layer.weight])


def test_some_gradients_alone_accumulation_and_checkpoints_are_those_of_pytorch() -> None:
    model, own = two_layers(), two_layers(first=False)
    inputs = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    gradients = torch.autograd.grad(model(inputs).square().sum(), [model[2].weight, inputs])
    wanted = torch.autograd.grad(own(inputs).square().sum(), [own[2].weight, inputs])
    assert all(map(torch.equal, gradients, wanted))
    assert all(parameter.grad is None for parameter in model.parameters())
    for network in (model, own):
        network(inputs).sum().backward(inputs=[network[2].weight])
        network(inputs).square().sum().backward()
        for reentrant in (False, True):
            checkpoint(network, inputs, use_reentrant=reentrant).square().sum().backward()
    for parameter, other in zip(model.parameters(), own.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)
    forget_unread(model.parameters())


def test_a_frozen_bias_has_no_gradient() -> None:
    layer = nn.Linear(3, 4)
    layer.bias.requires_grad_(False)
    assert_alike(layer, torch.randn(2, 3))
    assert layer.bias.grad is None
