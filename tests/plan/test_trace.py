"""Layers of modules: by hand, against PyTorch's own counter, and against the networks' known sizes."""

from __future__ import annotations

import gc
import itertools
import math
import random
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from unisono.errors import UsageError
from unisono.models import MODELS
from unisono.plan import trace as trace_module
from unisono.plan.trace import OutsideReads, tensors_in, trace, trace_values


class Block(nn.Module):
    """Transformer block with attention by operators, and weights of the embedding used twice."""

    def __init__(self, vocabulary: int = 50, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + torch.arange(tokens.shape[1])[None, :, None]
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).movedim(2, 0).transpose(2, 3)
        attended = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return self.head(x)  # type: ignore[no-any-return]


NO_SECONDS: Any = {"forward_seconds": 0.0, "backward_seconds": 0.0}

TOKENS = torch.zeros(2, 6, dtype=torch.long)

MODULES = {
    "conv1d with padding": (nn.Conv1d(4, 8, 3, padding=1), torch.empty(2, 4, 9)),
    "conv2d with a stride": (nn.Conv2d(3, 6, (3, 5), stride=2), torch.empty(2, 3, 11, 13)),
    "conv3d": (nn.Conv3d(2, 4, 3), torch.empty(1, 2, 5, 6, 7)),
    "transposed convolution": (nn.ConvTranspose2d(4, 6, 3, stride=2), torch.empty(2, 4, 5, 5)),
    "linear over 3 dimensions": (nn.Linear(5, 7), torch.empty(2, 3, 5)),
    "lstm": (nn.LSTM(5, 7, num_layers=2, bidirectional=True), torch.empty(3, 2, 5)),
    "gru": (nn.GRU(5, 7, batch_first=True), torch.empty(2, 3, 5)),
    "attention": (nn.MultiheadAttention(8, 2, batch_first=True), *[torch.empty(2, 3, 8)] * 3),
    "encoder": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.empty(2, 3, 8)),
    "own block": (Block(), TOKENS),
}


def peer_flops(model: nn.Module, *inputs: Tensor) -> tuple[int, int]:
    """FLOPs forward and backward by torch.utils.flop_counter, on the meta device too."""
    shadow, given = model.to("meta"), [tensor.to("meta") for tensor in inputs]
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        outputs = shadow(*given)
        forward = counter.get_total_flops()
        outputs = outputs[0] if isinstance(outputs, tuple) else outputs
        outputs.sum().backward()
    return forward, counter.get_total_flops() - forward


@pytest.mark.parametrize("name", MODULES)
def test_flops_are_those_of_pytorchs_counter(name: str) -> None:
    model, *inputs = MODULES[name]
    layers = trace(model, *inputs).layers
    flops = sum(layer.forward_flops for layer in layers), sum(layer.backward_flops for layer in layers)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert sum(layer.parameters for layer in layers) == parameters
    assert flops == peer_flops(model, *inputs)
    assert flops[0] > 0


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose3d])
def test_groups_of_a_convolution_are_convolutions_of_their_own(kind: type[nn.Module]) -> None:
    """PyTorch's counter has the gradient of the weights as if there were no groups, so it is no oracle here."""
    size = (7,) * int(kind.__name__[-2])
    (ungrouped,) = trace(kind(2, 3, 3), torch.empty(2, 2, *size, requires_grad=True)).layers
    (grouped,) = trace(kind(8, 12, 3, groups=4), torch.empty(2, 8, *size, requires_grad=True)).layers
    assert grouped.forward_flops == 4 * ungrouped.forward_flops > 0
    assert grouped.backward_flops == 4 * ungrouped.backward_flops == 2 * grouped.forward_flops


def test_the_worked_example() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    first, relu, last = trace(model, torch.empty(4, 3)).layers
    assert [layer.name for layer in (first, relu, last)] == ["0", "1", "2"]
    assert [layer.kind for layer in (first, relu, last)] == ["Linear", "ReLU", "Linear"]
    assert [layer.forward_flops for layer in (first, relu, last)] == [120, 0, 80]
    assert [layer.backward_flops for layer in (first, relu, last)] == [120, 0, 160]
    assert [layer.parameters for layer in (first, relu, last)] == [20, 0, 12]
    assert [layer.activations for layer in (first, relu, last)] == [20, 20, 8]
    assert first.activation_bytes == first.parameter_bytes == 80
    assert first.input_shapes == ((4, 3),)


def test_frozen_parameters_have_no_gradients() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    model[0].requires_grad_(False)
    model[1].bias.requires_grad_(False)
    body, head = trace(model, torch.randn(2, 3)).layers
    assert (body.parameter_bytes, body.gradient_bytes) == (64, 0)
    assert (head.parameter_bytes, head.gradient_bytes) == (100, 80)


def test_the_first_layers_inputs_have_a_gradient_if_they_are_asked_for() -> None:
    (layer,) = trace(nn.Linear(3, 5), torch.empty(4, 3, requires_grad=True)).layers
    assert layer.backward_flops == 2 * layer.forward_flops


def test_operators_of_a_block_are_its_own() -> None:
    layers = {layer.name: layer for layer in trace(Block(), TOKENS).layers}
    assert list(layers) == ["embedding", "", "norm", "qkv", "out", "head"]
    assert layers[""].forward_flops == 2 * 2 * (2 * 4) * 6 * 6 * 4  # q @ k and the weights @ v; 8 heads, 6 tokens
    assert layers[""].backward_flops == 2 * layers[""].forward_flops
    assert layers["qkv"].backward_flops == 2 * layers["qkv"].forward_flops == 2 * 2 * 12 * 16 * 48
    assert layers["embedding"].forward_flops == 0
    assert (layers["embedding"].parameters, layers["head"].parameters) == (50 * 16, 0)  # shared: once


def test_parameters_that_a_module_uses_without_a_call_are_its_own() -> None:
    layers = trace(nn.MultiheadAttention(8, 2), *[torch.empty(3, 2, 8)] * 3).layers
    assert [(layer.name, layer.parameters) for layer in layers] == [("", 4 * 8 * 8 + 4 * 8)]


def test_a_module_that_changes_its_input_has_its_own_backward_pass() -> None:
    linear, relu = trace(nn.Sequential(nn.Linear(5, 5), nn.ReLU(inplace=True)), torch.empty(2, 5)).layers
    assert (linear.kind, relu.kind) == ("Linear", "ReLU")
    assert relu.backward_seconds > 0


def test_parameters_that_nothing_uses_are_the_models() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)  # type: ignore[no-any-return]

    layers = trace(Unused(), torch.empty(2, 3)).layers
    assert [(layer.name, layer.kind, layer.parameters) for layer in layers] == [
        ("used", "Linear", 12),
        ("", "Unused", 16),
    ]


def test_a_module_that_is_called_twice_is_one_layer() -> None:
    shared = nn.Linear(5, 5)
    layers = trace(nn.Sequential(shared, nn.Tanh(), shared), torch.empty(2, 5)).layers
    assert [(layer.kind, layer.forward_flops, layer.parameters) for layer in layers] == [
        ("Linear", 2 * 2 * 2 * 25, 30),
        ("Tanh", 0, 0),
    ]


@pytest.mark.parametrize(
    ("name", "shape", "multiply_adds"),
    [
        ("vgg_a", (1, 3, 224, 224), 7_609_090_048),
        ("overfeat_fast", (1, 3, 231, 231), 2_801_403_904),
        ("alexnet", (1, 3, 224, 224), 724_406_816),
        ("resnet50", (2, 3, 224, 224), 2 * 4_089_184_256),
    ],
)
def test_networks_of_the_papers(name: str, shape: tuple[int, ...], multiply_adds: int) -> None:
    with torch.device("meta"):
        model = MODELS.load(name)(1000, 3)
    layers = trace(model, torch.empty(shape)).layers
    assert sum(layer.forward_flops for layer in layers) == 2 * multiply_adds
    first = layers[0]
    expected = 3 * sum(layer.forward_flops for layer in layers) - first.forward_flops  # no gradient of the images
    assert sum(layer.flops for layer in layers) == expected
    assert sum(layer.parameters for layer in layers) == sum(parameter.numel() for parameter in model.parameters())


def test_the_model_is_not_changed() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout()).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trace(model, torch.empty(4, 3))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(module.training or module._forward_hooks or module._forward_pre_hooks for module in model)
    assert all(parameter.grad is None and parameter.device.type == "cpu" for parameter in model.parameters())


class WithoutMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch's
    """Refusal of operators whose results take memory."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = operator(*args, **(kwargs or {}))
        assert all(tensor.device.type == "meta" for tensor in tensors_in(outputs)), operator
        return outputs


@pytest.mark.parametrize("model", [Block(), nn.LSTM(16, 5)], ids=["block", "lstm"])
def test_no_operator_takes_memory(model: nn.Module) -> None:
    inputs = TOKENS if isinstance(model, Block) else torch.empty(3, 2, 16)
    with WithoutMemory():
        assert trace(model, inputs).layers


class ReadsValues(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Raises(nn.Module):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        raise self.error


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (ReadsValues(), "RuntimeError: Tensor.item"),
        (nn.Linear(4, 2), "RuntimeError: "),
        (Raises(AssertionError("Wrong height\nExpected 224")), "AssertionError: Wrong height; give"),
        (Raises(AssertionError()), "AssertionError; give"),
        (Raises(KeyError("x")), "KeyError: 'x'; give"),
        (Raises(ZeroDivisionError("division by zero")), "ZeroDivisionError: division by zero; give"),
    ],
)
def test_a_layer_that_cannot_be_traced_is_named(broken: nn.Module, reason: str) -> None:
    kind = type(broken).__name__
    with pytest.raises(
        UsageError, match=rf"'inner.1', {kind}, cannot be traced with inputs of shape \(2, 3\): {reason}"
    ):
        trace(Outer(nn.Sequential(nn.Linear(3, 3), broken)), torch.empty(2, 3))


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


@dataclass
class Wrapped:
    logits: Tensor


def test_a_model_whose_outputs_have_no_gradient_is_refused() -> None:
    class Wrapping(nn.Linear):
        def forward(self, x: Tensor) -> Wrapped:  # type: ignore[override]
            return Wrapped(super().forward(x))

    example = torch.ones(2, 3)
    for values in (False, True):
        with pytest.raises(UsageError, match="Wrapping returned a Wrapped without a tensor that needs a gradient: ret"):
            trace_values(Wrapping(3, 3), [example], nullcontext()) if values else trace(Wrapping(3, 3), example)
    assert trace(Wrapping(3, 3).requires_grad_(requires_grad=False), example).layers


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_makes_again_is_part_of_the_backward_pass_and_no_output(reentrant: bool) -> None:
    class Checkpointed(Outer):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    inner = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    x = torch.empty(4, 3, requires_grad=True)
    once, again = ([layer for layer in trace(kind(inner), x).layers if layer.name] for kind in (Outer, Checkpointed))
    assert [layer.activation_bytes for layer in again] == [layer.activation_bytes for layer in once]
    assert [layer.forward_flops for layer in again] == [layer.forward_flops for layer in once]
    assert again[0].backward_flops == once[0].backward_flops + once[0].forward_flops


def test_plain_tensors_of_modules_are_copied_without_memory() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.full((3,), math.pi)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    (layer,) = trace(Scaled(), torch.empty(2, 3)).layers
    assert (layer.kind, layer.activations) == ("Scaled", 6)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(6, 3))


def test_values_are_traced_as_shapes_are_with_seconds() -> None:
    example = torch.randn(5, 4)
    values, shapes = trace_values(network(), (example,), nullcontext()), trace(network(), example)
    assert values.once == shapes.once == {"", "0", "1", "2", "3", "4"}
    assert [replace(layer, **NO_SECONDS) for layer in values.layers] == [
        replace(layer, **NO_SECONDS) for layer in shapes.layers
    ]
    assert all(layer.forward_seconds > 0 and layer.backward_seconds > 0 for layer in values.layers)
    assert [layer.input_requires_grad for layer in values.layers] == [False, True, True, True, True]
    assert (values.layers[0].input_bytes, values.layers[0].activation_bytes) == (4 * 5 * 4, 4 * 5 * 6)


def test_a_call_that_fails_ends_where_the_model_goes_on() -> None:
    class Trying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 4))
            self.other = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return torch.as_tensor(self.inner(x))
            except RuntimeError:
                return torch.as_tensor(self.other(x))

    traced = trace_values(Trying(), (torch.zeros(2, 4),), nullcontext())
    assert traced.once == {"", "other"}
    assert {layer.name for layer in traced.layers if layer.flops} == {"other"}


def test_values_decide_what_a_model_calls() -> None:
    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.experts[int(x[0, 0])](x))

    assert trace_values(Choosing(), (torch.ones(2, 4),), nullcontext()).once == {"", "experts.1"}


def test_the_model_and_the_random_numbers_stay_as_they_were() -> None:
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    trace_values(model, (torch.randn(5, 4, generator=torch.Generator().manual_seed(0)),), nullcontext())
    assert torch.equal(state, torch.get_rng_state())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_buffers_that_are_assigned_attributes_and_generators_stay_as_they_were() -> None:
    class Changing(nn.Module):
        mean: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))
            self.calls, self.seen = 0, list[float]()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            self.calls += 1
            self.seen.append(random.random() + np.random.rand())
            return x * torch.rand(4)

    model, python, numpy, pytorch = Changing(), random.getstate(), np.random.get_state(), torch.get_rng_state()
    mean = model.mean
    trace_values(model, (torch.ones(2, 4),), nullcontext())
    assert model.mean is mean
    assert (mean.tolist(), model.calls, model.seen) == ([0.0] * 4, 0, [])
    assert random.getstate() == python
    assert str(np.random.get_state()) == str(numpy)
    assert torch.equal(torch.get_rng_state(), pytorch)


def test_a_model_that_cannot_be_copied_needs_a_plan_by_hand() -> None:
    locked = network()
    locked.lock = threading.Lock()
    computed = network()
    computed.scale = computed[0].weight * 2
    for model in (locked, computed):
        with pytest.raises(UsageError, match=r"^Sequential cannot be copied, .*name the layers in a plan") as caught:
            trace_values(model, (torch.zeros(5, 4),), nullcontext())
        assert "\n" not in str(caught.value)


Read = Callable[[nn.Linear, Tensor], object]


class Reading(nn.Module):
    """Linear layer, and a read of it afterwards."""

    def __init__(self, read: Read) -> None:
        super().__init__()
        self.fc, self.read = nn.Linear(4, 4), read

    def forward(self, x: Tensor) -> object:
        return self.read(self.fc, self.fc(x))


@pytest.mark.parametrize(
    "read",
    [
        lambda fc, y: nn.functional.linear(y, fc.weight),
        lambda fc, y: nn.functional.linear(y, weight=fc.weight),
        lambda fc, y: y @ fc.weight.t(),
        lambda fc, y: torch.cat([y, fc.weight]),
        lambda fc, y: y + fc.weight.data.sum(),
        lambda fc, y: y.view(-1, fc.weight.shape[0]),
        lambda fc, y: (y, {"weight": fc.weight}),
        lambda fc, _: fc.bias,
    ],
)
def test_reads_by_functions_methods_and_results_are_found(read: Read) -> None:
    assert trace(Reading(read), torch.zeros(2, 4)).once == {""}


@pytest.mark.parametrize(
    "read",
    [
        lambda _, y: y,
        lambda fc, y: y.to(fc.weight.device, fc.weight.dtype),
    ],
)
def test_calls_and_what_a_part_has_too_are_not(read: Read) -> None:
    assert "fc" in trace(Reading(read), torch.zeros(2, 4)).once


def test_hooks_read_outside() -> None:
    before, after = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
    before[0].register_forward_pre_hook(lambda layer, _: layer.weight.sum() and None)
    after[0].register_forward_hook(lambda layer, *_: layer.weight.sum() and None)
    for model in (before, after):
        assert trace_values(model, (torch.zeros(2, 4),), nullcontext()).once == {""}


def test_modules_that_run_may_read() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    reads = OutsideReads(model)
    with reads:
        reads.running.append("1")
        assert model[1].weight.sum() is not None
        assert reads.found == set()
        assert model[0].weight.sum() is not None
    assert reads.found == {"0"}
    assert model[1].weight.sum() is not None  # after it, nothing is watched
    assert reads.found == {"0"}


@pytest.mark.parametrize(("threads", "clock"), [(1, "thread_time"), (2, "perf_counter")])
def test_a_lone_thread_is_timed_by_its_own_clock(threads: int, clock: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may have its core meanwhile; several threads wait for each other."""
    clocks = {name: itertools.count(step=step).__next__ for name, step in (("thread_time", 1.0), ("perf_counter", 1e3))}
    monkeypatch.setattr(trace_module, "time", SimpleNamespace(**clocks))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    (layer,) = trace_values(nn.Linear(3, 2), (torch.ones(4, 3),), nullcontext()).layers
    assert layer.forward_seconds % {"thread_time": 1.0, "perf_counter": 1e3}[clock] == 0
    assert (layer.forward_seconds >= 1e3) == (clock == "perf_counter")


def test_nothing_of_a_traced_copy_stays() -> None:
    """The copies of the model and their gradients did, through hooks of autograd's nodes, which Python does not see."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    trace_values(model, (torch.ones(4, 64),), nullcontext())
    gc.collect()
    layers = [thing for thing in gc.get_objects() if type(thing) is nn.Linear and thing.in_features == 64]
    assert {*map(id, layers)} == {id(model[0]), id(model[2])}
