"""The layer report: time and throughput of each layer's three passes, and the bound of each (swCaffe 6.1, table 2).

    model ─ shapes, without computing ─▶ layers ─ each pass by itself, on random numbers ─▶ timings

Layers of the same sizes are measured once. A bound is the longer of two times: that of the operations at the measured
peak of products, and that of inputs, outputs and weight at the measured rate of memory. Operations are counted as in a
plain sum, so an algorithm that needs fewer can be faster than the bound of products.

Layers are modules without submodules. Calls between them (`torch.cat`, the sum of a residual) are not measured. Of a
convolution and a wide layer only the product is, without its bias and the rounding of its weight.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unisono.bench.peak import Peak
from unisono.compute.convolution import geometry_of, plannable
from unisono.compute.convolution_plan import ConvolutionPlan
from unisono.compute.geometry import Geometry, Pass
from unisono.compute.prepare import autocast_to
from unisono.errors import UsageError

TIMED_REPETITIONS = 3
"""Timed repetitions of each pass."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class BenchLayer:
    """A layer of a model, with the shapes of its inputs and outputs."""

    name: str
    module: nn.Module
    inputs: Shape
    outputs: Shape


@dataclass(frozen=True)
class LayerTiming:
    """Time of one pass of one layer."""

    layer: str
    kind: str
    """Name of the module's class."""
    pass_name: str
    seconds: float
    operations: int
    """Additions and multiplications; 0 for layers that only read and write."""
    least_bytes: int
    algorithm: str
    """Algorithm that computes a convolution; empty for other layers."""

    def share_of_bound(self, peak: Peak) -> float:
        """Return the bound over the time: 1 at the bound."""
        return peak.least_seconds(self.operations, self.least_bytes) / self.seconds


def layers_of(model: nn.Module, inputs: Shape) -> list[BenchLayer]:
    """Return the layers that compute something for inputs of this shape, in the order in which they run.

    Raises UsageError where the model refuses such inputs.
    """
    found: list[BenchLayer] = []
    shadow = copy.deepcopy(model).to("meta")
    names = {module: name for name, module in shadow.named_modules() if not any(module.children())}
    own = dict(model.named_modules())

    def record(module: nn.Module, given: tuple[Any, ...], outputs: Any) -> None:
        if isinstance(outputs, Tensor) and given and isinstance(given[0], Tensor):
            name = names[module]
            found.append(BenchLayer(name, own[name], tuple(given[0].shape), tuple(outputs.shape)))

    hooks = [module.register_forward_hook(record) for module in names]
    try:
        shadow(torch.empty(inputs, device="meta"))
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"the model does not accept inputs of shape {inputs}: {error}") from error
    finally:
        for hook in hooks:
            hook.remove()
    return [layer for layer in found if not isinstance(layer.module, nn.Flatten | nn.Identity)]


def measure_layers(
    layers: list[BenchLayer], plan: ConvolutionPlan, dtype: torch.dtype, log: Callable[[str], None]
) -> list[LayerTiming]:
    """Time the passes of each layer, with products in `dtype`; the first layer's inputs need no gradient.

    Raises UsageError for a layer that cannot be computed in `dtype`.
    """
    rows: list[LayerTiming] = []
    known: dict[Any, list[LayerTiming]] = {}
    for number, layer in enumerate(layers):
        key = (repr(layer.module), layer.inputs, number == 0)
        if key not in known:
            log(f"{number + 1}/{len(layers)} {layer.name}")
            try:
                known[key] = list(_measure(layer, plan, dtype, first=number == 0))
            except RuntimeError as error:
                raise UsageError(
                    f"layer {layer.name}, {layer.module}, cannot be computed in {dtype}: {error}; "
                    "try --precision float32"
                ) from error
        rows += [LayerTiming(**{**asdict(row), "layer": layer.name}) for row in known[key]]
    return rows


def _measure(layer: BenchLayer, plan: ConvolutionPlan, dtype: torch.dtype, first: bool) -> Iterator[LayerTiming]:
    module = layer.module
    if isinstance(module, nn.Conv2d) and plannable(module, layer.inputs):
        passes = _of_convolution(module, layer, plan, dtype)
    elif isinstance(module, nn.Linear):
        passes = _of_linear(module, layer, dtype)
    else:
        passes = _of_other(module, layer, dtype)
    for which, (work, operations, least_bytes, algorithm) in passes.items():
        if not (first and which is Pass.GRAD_INPUT):
            row = type(module).__name__, which.value, median_of(work), operations
            yield LayerTiming(layer.name, *row, least_bytes, algorithm() if algorithm else "")


Work = tuple[Callable[[], object], int, int, Callable[[], str] | None]


def _of_convolution(
    module: nn.Conv2d, layer: BenchLayer, plan: ConvolutionPlan, dtype: torch.dtype
) -> Mapping[Pass, Work]:
    inputs = _random(layer.inputs, dtype)
    gradient, weight = _random(layer.outputs, dtype), module.weight.detach().to(dtype)
    geometry = geometry_of(module, inputs)
    given = {Pass.FORWARD: (inputs, weight), Pass.GRAD_INPUT: (gradient, weight), Pass.GRAD_WEIGHT: (inputs, gradient)}

    def work(which: Pass, geometry: Geometry) -> Work:
        return (
            lambda: plan.compute(which, geometry, *given[which]),
            geometry.operations,
            geometry.least_bytes,
            lambda: plan.algorithm(which, geometry),
        )

    return {which: work(which, geometry) for which in given}


def _of_linear(module: nn.Linear, layer: BenchLayer, dtype: torch.dtype) -> Mapping[Pass, Work]:
    inputs = _random(layer.inputs, dtype).reshape(-1, module.in_features)
    gradient, weight = _random(layer.outputs, dtype).reshape(-1, module.out_features), module.weight.detach().to(dtype)
    operations = 2 * len(inputs) * weight.numel()
    least_bytes = (inputs.numel() + gradient.numel() + weight.numel()) * dtype.itemsize
    products: Mapping[Pass, Callable[[], object]] = {
        Pass.FORWARD: lambda: inputs @ weight.t(),
        Pass.GRAD_INPUT: lambda: gradient @ weight,
        Pass.GRAD_WEIGHT: lambda: gradient.t() @ inputs,
    }
    return {which: (work, operations, least_bytes, None) for which, work in products.items()}


def _of_other(module: nn.Module, layer: BenchLayer, dtype: torch.dtype) -> Mapping[Pass, Work]:
    inputs, within = _random(layer.inputs, dtype).requires_grad_(), partial(autocast_to, dtype, torch.float32, "cpu")
    given = inputs.clone()  # layers may change it in place, which autograd forbids for a leaf

    def forward() -> Tensor:
        with within():
            outputs: Tensor = module(given)
            return outputs

    with within():
        outputs = module(inputs.clone())
    gradient = torch.randn_like(outputs)
    least_bytes = inputs.nbytes + gradient.nbytes

    def backward() -> object:
        return torch.autograd.grad(outputs, inputs, gradient, retain_graph=True)

    return {Pass.FORWARD: (forward, 0, least_bytes, None), Pass.GRAD_INPUT: (backward, 0, 2 * least_bytes, None)}


def _random(shape: Shape, dtype: torch.dtype) -> Tensor:
    tensor = torch.randn(shape).to(dtype)
    return tensor.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else tensor


def median_of(work: Callable[[], object]) -> float:
    """Return the median seconds of `work`, after one untimed call."""
    work()
    seconds = []
    for _ in range(TIMED_REPETITIONS):
        begun = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)
