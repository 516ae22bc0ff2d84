"""Layers of any torch.nn.Module: FLOPs, parameters and activations of each, in the order of the forward pass.

A copy of the model makes one forward and one backward pass: on the meta device, which has shapes but no memory
(`trace`), or on values (`trace_values`). Each operator that PyTorch dispatches counts for the module that called it:

    model ─ copy ─▶ forward: the innermost module that runs        operators ─▶ FLOPs, seconds
                    backward: the module that made the node

    layer         a module that ran operators itself: most have no submodules; a block may add, or attend
    FLOPs         of matrix products and convolutions, 2 for each multiply-add (`operator_flops`); other operators count
                  nothing: their time is that of memory
    parameters    its own, once for all layers that share them, and those of submodules that it uses without calling
                  them, as torch.nn.MultiheadAttention does with its output projection

Worked example: Linear(3, 5), ReLU, Linear(5, 2) for 4 samples in float32.

    layer   FLOPs forward       backward                    parameters   outputs
    0       2 * 4 * 3 * 5 = 120 120: inputs need no gradient  20           20 numbers, 80 bytes
    1       0                   0                           0            20
    2       2 * 4 * 5 * 2 = 80  160                         12           8

Known limits: models that read values while they run (`if x.sum() > 0`, `.item()`, nonzero) need values. LSTMs and
GRUs are traced one time step after another, slowly. Outputs of layers within a checkpoint count as kept, once.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from unisono.device import random_numbers_kept, synchronize
from unisono.errors import UsageError
from unisono.processor import HOST

aten = torch.ops.aten

FACTORS = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}
"""Place of the first factor among the arguments of a matrix product."""

SAME_OF_A_PART = tuple(
    getattr(Tensor, name).__get__ for name in ("device", "dtype", "is_cuda", "layout", "ndim", "requires_grad")
)
"""Reads of a parameter that give the same of a part as of the whole."""

MODEL_ERRORS = RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError
"""Errors of a model on inputs, or memory, that it does not take; `torch._assert` raises AssertionError."""


@dataclass
class TracedLayer:
    """Cost of a layer in a step on the traced inputs."""

    name: str
    """Name of the module in the model; empty: the model itself."""
    kind: str
    """Name of the module's class."""
    forward_flops: int = 0
    backward_flops: int = 0
    parameters: int = 0
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    """Bytes of the gradients of its parameters: of those that are trained."""
    activations: int = 0
    """Numbers of its outputs, summed over its calls."""
    activation_bytes: int = 0
    input_shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes of the tensors of its first call."""
    calls: int = 0
    input_bytes: int = 0
    """Bytes of the first tensor of its last call."""
    input_requires_grad: bool = False
    """True where that tensor needs a gradient."""
    forward_seconds: float = 0.0
    """Seconds of its operators in the forward pass, of a lone thread its own; they mean nothing without values."""
    backward_seconds: float = 0.0
    forward_of_weights: float = 0.0
    """Seconds of these that any number of samples takes, as those in which weights come from memory (`timing.py`)."""
    backward_of_weights: float = 0.0

    @property
    def flops(self) -> int:
        """FLOPs of a step."""
        return self.forward_flops + self.backward_flops


class Trace(NamedTuple):
    """Layers of a step, and the modules that can be split."""

    layers: list[TracedLayer]
    once: frozenset[str]
    """Modules that were called once, and whose own parameters nothing else read."""


def trace(model: nn.Module, *inputs: Tensor) -> Trace:
    """Return the trace of a training step on inputs of these shapes and dtypes; their values do not count.

    The model is not changed, and no memory is taken for weights or activations. Inputs that require a gradient get one.

    Raises UsageError, naming the layer, for a model that cannot be traced.
    """
    given = [torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad) for tensor in inputs]
    return _trace(_without_memory(model), given, torch.device("meta"))


def trace_values(model: nn.Module, inputs: Sequence[Any], within: AbstractContextManager[Any]) -> Trace:
    """Return the trace of a training step on these values, in the model's present mode and the context `within`.

    The model stays as it is, and so do the random numbers of PyTorch, NumPy and Python. Raises UsageError as `trace`.
    """
    with all_random_numbers_kept(device_of(model)):
        return _trace(copy_of(model, {}), inputs, within)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's parameters; the host where it has none."""
    return next((parameter.device for parameter in model.parameters()), torch.device(HOST))


def now(device: torch.device) -> float:
    """Return the time, in seconds, once a device has done what it was given."""
    synchronize(device)
    return time.perf_counter()


@contextmanager
def all_random_numbers_kept(device: torch.device) -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with random_numbers_kept(device):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def pass_back(outputs: Any, model: nn.Module) -> None:
    """Make the backward pass of the sum of all outputs. Raises UsageError where only weights need a gradient."""
    if reached := [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]:
        torch.autograd.backward(reached, [torch.ones_like(tensor) for tensor in reached])
    elif any(parameter.requires_grad for parameter in model.parameters()):
        returned = f"{type(model).__name__} returned a {type(outputs).__name__} without a tensor that needs a gradient"
        raise UsageError(f"{returned}: return one, alone or in tuples, lists or mappings")


def _trace(shadow: nn.Module, inputs: Sequence[Any], within: Any) -> Trace:
    """Return the trace of a model that is changed by it."""
    counter = _OperatorCounter(shadow)
    try:
        with within, torch.enable_grad(), counter.counting():
            with counter.reads:
                outputs = shadow(*inputs)
            pass_back(outputs, shadow)
    except MODEL_ERRORS as error:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors_in(inputs))
        raise UsageError(
            f"{counter.place()} cannot be traced with inputs of shape {shapes}: {reason_of(error)}; "
            "give inputs that it accepts; a model that depends on values while it runs cannot be traced"
        ) from error
    _count_parameters(shadow, counter.layers)
    once = frozenset(name for name, layer in counter.called.items() if layer.calls == 1)
    return Trace(list(counter.layers.values()), once - counter.reads.found)


def reason_of(error: Exception) -> str:
    """Return the first line of an error of a model, with its kind: a key alone is no reason."""
    return f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")


def _without_memory(model: nn.Module) -> nn.Module:
    """Return a copy of the model in training mode whose tensors have no memory; shared ones stay shared."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        attributes = [value for value in vars(module).values() if isinstance(value, Tensor)]
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False), *attributes):
            empty = torch.empty_like(tensor, device="meta")
            memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy_of(model, memo).train()


def copy_of(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    try:
        return copy.deepcopy(model, memo)
    except MODEL_ERRORS as error:
        raise UsageError(
            f"{type(model).__name__} cannot be copied, and layers are traced on a copy: {reason_of(error)}; name the "
            'layers in a plan of your own in place of "auto"'
        ) from error


def _count_parameters(model: nn.Module, layers: dict[str, TracedLayer]) -> None:
    """Add each parameter to the layer that has it, or to the nearest around that; to the model, as a last layer, if
    none of these ran an operator."""
    seen: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = name.rpartition(".")[0]
        while owner and owner not in layers:
            owner = owner.rpartition(".")[0]
        if id(parameter) not in seen:
            seen.add(id(parameter))
            layer = layers.setdefault(owner, TracedLayer(owner, type(model).__name__))
            layer.parameters += parameter.numel()
            layer.parameter_bytes += parameter.nbytes
            layer.gradient_bytes += parameter.nbytes * parameter.requires_grad


class _OperatorCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch's
    """Counter of the operators of a pass, by layer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch's
        self._names = {module: name for name, module in model.named_modules()}
        self._device = device_of(model)
        self.layers: dict[str, TracedLayer] = {}
        """Modules in the order in which they ran their first operator."""
        self.called: dict[str, TracedLayer] = {}
        self.reads = OutsideReads(model)
        self._running = self.reads.running
        self._before: list[set[Any]] = []
        """Autograd nodes of the inputs of the modules that run; a module may change an input, and so its node."""
        self._backward_of: str | None = None
        self._failed: str | None = None
        """Innermost module of the last call, where that has returned nothing."""
        self._owned: set[Any] = set()

    @contextmanager
    def counting(self) -> Iterator[None]:
        with ExitStack() as hooks:
            for module in self._names:  # next to `forward`: other hooks may read a weight
                hooks.enter_context(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(self._leave, prepend=True, always_call=True))
            hooks.callback(self._owned.clear)  # nodes hold this object: in a circle that Python does not see
            with self:
                yield

    def place(self) -> str:
        """Return words for the layer that runs."""
        name = self._running[-1] if self._running else self._failed or self._backward_of
        return f"layer {name!r}, {self.called[name].kind}," if name else "the model"

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        alone = self._device.type == HOST and torch.get_num_threads() == 1
        clock = time.thread_time if alone else partial(now, self._device)
        begin = clock()  # a lone thread's own time: not that of other ranks on its core
        outputs = operator(*args, **(kwargs or {}))
        seconds = clock() - begin
        name = self._running[-1] if self._running else self._backward_of
        if name not in self.called or operator.is_view:
            return outputs
        layer, flops = self.layers.setdefault(name, self.called[name]), operator_flops(operator, args, outputs)
        if "" in self._running:  # else the backward pass, in which a checkpoint runs layers again, but not the model
            layer.forward_flops += flops
            layer.forward_seconds += seconds
        else:
            layer.backward_flops += flops
            layer.backward_seconds += seconds
        return outputs

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        name, given = self._names[module], list(tensors_in((args, kwargs)))
        shapes = tuple(tuple(tensor.shape) for tensor in given)
        layer = self.called.setdefault(name, TracedLayer(name, type(module).__name__, input_shapes=shapes))
        layer.calls += 1
        for first in given[:1]:
            layer.input_bytes, layer.input_requires_grad = first.nbytes, first.requires_grad
        self._failed = None
        self._running.append(name)
        self._before.append({tensor.grad_fn for tensor in given})

    def _leave(self, _: nn.Module, __: Any, outputs: Any) -> None:
        layer = self.called[self._running.pop()]
        self.reads.look(outputs)
        if outputs is None:
            self._failed = self._failed or layer.name
            layer.calls += 1  # the model may go on, but the layer gives no tensor
        for tensor in tensors_in(outputs if "" in (layer.name, *self._running) else ()):
            layer.activations += tensor.numel()
            layer.activation_bytes += tensor.nbytes
        waiting, seen = [tensor.grad_fn for tensor in tensors_in(outputs)], set(self._before.pop())
        while waiting:  # the nodes up to those of the inputs are this layer's, as far as no submodule has them
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node not in self._owned:
                self._owned.add(node)
                node.register_prehook(partial(self._begin_backward, layer.name))
            waiting += [following for following, _ in node.next_functions]

    def _begin_backward(self, name: str, _: Any) -> None:
        self._backward_of = name


class OutsideReads(TorchFunctionMode):
    """Context that finds the modules whose own parameters are read while they do not run.

        runs       words(numbers)    hidden(x)    F.linear(h, words.weight)
        reads      words.weight      hidden.*     words.weight: outside, so `words` stays whole

    A layer that is split has a part of its weight, and exchanges only what goes through its own call. Reads are those
    of PyTorch's functions and methods; a compiled or scripted function is not looked into.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._owners = {
            id(tensor): name for name, module in model.named_modules() for tensor in module.parameters(recurse=False)
        }
        self.running: list[str] = []
        """Names of the modules that run, the outermost first; the caller keeps it."""
        self.found: set[str] = set()
        """Names of the modules whose parameters were read outside."""

    def look(self, value: Any) -> None:
        """Note the parameters in a value, also inside tuples, lists and mappings, whose module does not run."""
        owners = {self._owners.get(id(tensor)) for tensor in tensors_in(value)}
        self.found |= {name for name in owners if name is not None and name not in self.running}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in SAME_OF_A_PART:
            self.look((args, kwargs))
        return func(*args, **(kwargs or {}))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a value: a tensor, or tuples, lists and mappings of such."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):  # before mappings, whose check takes a microsecond
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))


def operator_flops(operator: Any, args: tuple[Any, ...], outputs: Any) -> int:
    """Return the FLOPs of a call of an operator of `torch.ops`, given its arguments and what it returned.

        (m, k) @ (k, n)            2 m k n; a batch of them: as many times
        convolution                2 outputs * weights / output channels, in 1 to 3 dimensions, also in groups;
                                   transposed: 2 inputs * weights / input channels
        its two gradients          that of the forward pass, each, if it is asked for

    Worked example: 64 channels of 56 x 56 to 128, 3x3, in 2 groups, one sample. The weights are (128, 32, 3, 3), an
    output needs 32 * 9 = 288 multiply-adds: 2 * 128 * 56 * 56 * 288 = 231 million.
    """
    operator = getattr(operator, "overloadpacket", operator)
    if (first := FACTORS.get(operator)) is not None:
        return 2 * int(args[first].numel()) * int(args[first + 1].shape[-1])
    if operator in (aten.mv, aten.dot):
        return 2 * int(args[0].numel())
    if operator is aten.convolution:
        return _convolution_flops(args[1], args[0], outputs, args[6])
    if operator is aten.convolution_backward:
        asked = sum(output is not None for output in outputs[:2])
        return asked * _convolution_flops(args[2], args[1], args[0], args[7])
    return 0


def _convolution_flops(weight: Tensor, inputs: Tensor, outputs: Tensor, transposed: bool) -> int:
    """Return the FLOPs of a forward pass: a weight is used once for each output, or input if transposed."""
    return 2 * (inputs if transposed else outputs).numel() * prod(weight.shape[1:])
