"""The layer report: time and throughput of each layer's three passes, and the bound of each (swCaffe 6.1, table 2).

    model ─ shapes, without computing ─▶ layers ─ each pass by itself, on random numbers ─▶ timings

Layers of the same sizes are measured once. A bound is the longer of two times: that of the operations at the measured
peak of products, and that of inputs, outputs and weight at the measured rate of memory. Operations are counted as in a
plain sum, so an algorithm that needs fewer can be faster than the bound of products.

Layers are modules without submodules. Calls between them (`torch.cat`, the sum of a residual) are not measured. Of a
convolution and a wide layer only the product is, without its bias and the rounding of its weight.

The peak is that of large work, measured here:

    products   operations per second: the best of large matrix products, one square and one tall, and a convolution of
               the library, which uses blocks that fit the caches
    memory     bytes per second, read and written: a copy larger than the caches

A layer can exceed it a little: its numbers may lie in the cache, or the clock may be higher at that moment. Writes in
place read no line of memory first.
"""

from __future__ import annotations

import copy
import statistics
import timeit
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from rich import box
from rich.table import Table
from torch import Tensor, nn

from unisono.compute.algorithms import DEFAULT
from unisono.compute.convolution import geometry_of, plannable
from unisono.compute.convolution_plan import ConvolutionPlan, key_of
from unisono.compute.geometry import Geometry, Pass
from unisono.compute.prepare import autocast_to
from unisono.errors import UsageError
from unisono.formats import format_bytes
from unisono.view.chart import Bar, draw_bars

TIMED_REPETITIONS = 3
"""Timed repetitions of each pass, of which the median counts."""

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
    times: Mapping[str, float] = field(default_factory=dict)
    """Time of each algorithm, where several were timed; DEFAULT is PyTorch's own."""

    def share_of_bound(self, peak: Peak) -> float:
        """Return the bound over the time: 1 at the bound."""
        return max(self._least_seconds(peak)) / self.seconds

    def bound(self, peak: Peak) -> str:
        """Return the name of the bound."""
        products, memory = self._least_seconds(peak)
        return "memory" if memory > products else "products"

    def _least_seconds(self, peak: Peak) -> tuple[float, float]:
        return self.operations / peak.operations_per_second, self.least_bytes / peak.bytes_per_second


def layers_of(model: nn.Module, inputs: Shape) -> list[BenchLayer]:
    """Return the layers that compute something for inputs of this shape, in the order in which they run.

    Raises UsageError where the model refuses such inputs.
    """
    layers, modules = list[BenchLayer](), dict(model.named_modules())
    shadow = copy.deepcopy(model).to("meta")

    def record(name: str, _: nn.Module, given: tuple[Any, ...], outputs: Any) -> None:
        if isinstance(outputs, Tensor) and given and isinstance(given[0], Tensor):
            layers.append(BenchLayer(name, modules[name], tuple(given[0].shape), tuple(outputs.shape)))

    for name, module in shadow.named_modules():
        if not any(module.children()):
            module.register_forward_hook(partial(record, name))
    try:
        shadow(torch.empty(inputs, device="meta"))
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"the model does not accept inputs of shape {inputs}: {error}") from error
    return [layer for layer in layers if not isinstance(layer.module, nn.Flatten | nn.Identity)]


def measure_layers(
    layers: list[BenchLayer], plan: ConvolutionPlan, dtype: torch.dtype, log: Callable[[str], None]
) -> list[LayerTiming]:
    """Time the passes of each layer, with products in `dtype`; the first layer's inputs need no gradient.

    Raises UsageError for a layer that cannot be computed in `dtype`.
    """
    rows: list[LayerTiming] = []
    known: dict[Any, list[LayerTiming]] = {}
    for index, layer in enumerate(layers):
        key = (repr(layer.module), layer.inputs, index == 0)
        if key not in known:
            log(f"{index + 1}/{len(layers)} {layer.name}")
            try:
                known[key] = list(_measure(layer, plan, dtype, first=index == 0))
            except RuntimeError as error:
                raise UsageError(
                    f"layer {layer.name}, {layer.module}, cannot be computed in {dtype}: {error}; "
                    "try --precision float32"
                ) from error
        rows += [replace(row, layer=layer.name) for row in known[key]]
    return rows


class TimedPass(NamedTuple):
    """Pass of a layer, to be timed."""

    which: Pass
    call: Callable[[], object]
    operations: int
    least_bytes: int
    geometry: Geometry | None = None
    """That of a convolution, which the plan computes."""


def _measure(layer: BenchLayer, plan: ConvolutionPlan, dtype: torch.dtype, first: bool) -> Iterator[LayerTiming]:
    for which, call, operations, least_bytes, geometry in _passes(layer, plan, dtype):
        if not (first and which is Pass.GRAD_INPUT):
            seconds = statistics.median(seconds_of(call, TIMED_REPETITIONS))
            kind, name, times = type(layer.module).__name__, "", dict[str, float]()
            if geometry is not None:  # the plan may have timed the algorithms on a part of the batch
                name, timed = plan.algorithm(which, geometry), plan.measured.get(key_of(geometry, which), {})
                times = {way: seconds * took / timed[name] for way, took in timed.items()}
            yield LayerTiming(layer.name, kind, which.value, seconds, operations, least_bytes, name, times)


def _passes(layer: BenchLayer, plan: ConvolutionPlan, dtype: torch.dtype) -> Iterator[TimedPass]:
    """Yield the passes of a layer, the forward pass first."""
    module = layer.module
    if isinstance(module, nn.Conv2d) and plannable(module, layer.inputs):
        return _of_convolution(module, layer, plan, dtype)
    return _of_linear(module, layer, dtype) if isinstance(module, nn.Linear) else _of_other(module, layer, dtype)


def _of_convolution(
    module: nn.Conv2d, layer: BenchLayer, plan: ConvolutionPlan, dtype: torch.dtype
) -> Iterator[TimedPass]:
    inputs = _random(layer.inputs, dtype)
    gradient, weight = _random(layer.outputs, dtype), module.weight.detach().to(dtype)
    geometry = geometry_of(module, inputs)
    given = {Pass.FORWARD: (inputs, weight), Pass.GRAD_INPUT: (gradient, weight), Pass.GRAD_WEIGHT: (inputs, gradient)}
    for which, tensors in given.items():
        call = partial(plan.compute, which, geometry, *tensors)
        yield TimedPass(which, call, geometry.operations, geometry.least_bytes, geometry)


def _of_linear(module: nn.Linear, layer: BenchLayer, dtype: torch.dtype) -> Iterator[TimedPass]:
    inputs = _random(layer.inputs, dtype).reshape(-1, module.in_features)
    gradient, weight = _random(layer.outputs, dtype).reshape(-1, module.out_features), module.weight.detach().to(dtype)
    operations = 2 * len(inputs) * weight.numel()
    least_bytes = (inputs.numel() + gradient.numel() + weight.numel()) * dtype.itemsize
    yield TimedPass(Pass.FORWARD, lambda: inputs @ weight.t(), operations, least_bytes)
    yield TimedPass(Pass.GRAD_INPUT, lambda: gradient @ weight, operations, least_bytes)
    yield TimedPass(Pass.GRAD_WEIGHT, lambda: gradient.t() @ inputs, operations, least_bytes)


def _of_other(module: nn.Module, layer: BenchLayer, dtype: torch.dtype) -> Iterator[TimedPass]:
    inputs = _random(layer.inputs, dtype).requires_grad_()

    def forward(given: Tensor) -> Tensor:
        with autocast_to(dtype, torch.float32, "cpu"):
            outputs: Tensor = module(given)
            return outputs

    outputs = forward(inputs.clone())  # layers may change it in place, which autograd forbids for a leaf
    gradient = torch.randn_like(outputs)
    least_bytes = inputs.nbytes + gradient.nbytes
    yield TimedPass(Pass.FORWARD, partial(forward, inputs.clone()), 0, least_bytes)
    backward = partial(torch.autograd.grad, outputs, inputs, gradient, retain_graph=True)
    yield TimedPass(Pass.GRAD_INPUT, backward, 0, 2 * least_bytes)


def _random(shape: Shape, dtype: torch.dtype) -> Tensor:
    tensor = torch.randn(shape).to(dtype)
    return tensor.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else tensor


def seconds_of(work: Callable[[], object], repetitions: int, calls: int = 1) -> list[float]:
    """Return the seconds of `calls` calls of `work` together, for each repetition, after an untimed one."""
    return timeit.repeat(work, number=calls, repeat=1 + repetitions)[1:]


def as_data(rows: Sequence[LayerTiming], peak: Peak, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return all measurements as data for JSON: seconds, operations, bytes."""
    return {
        **facts,
        "peak": asdict(peak),
        "medians": medians(rows, peak),
        "rows": [{**asdict(row), "share_of_bound": row.share_of_bound(peak), "bound": row.bound(peak)} for row in rows],
    }


def medians(rows: Sequence[LayerTiming], peak: Peak) -> dict[str, float]:
    """Return, for each pass, the share of the bound that the median convolution reaches."""
    shares = defaultdict[str, list[float]](list)
    for row in rows:
        if row.kind == "Conv2d":
            shares[row.pass_name].append(row.share_of_bound(peak))
    return {name: statistics.median(each) for name, each in shares.items()}


def as_table(rows: Sequence[LayerTiming], peak: Peak) -> Table:
    """Return a table with a row for each pass of each layer."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("layer", "kind", "pass"):
        table.add_column(name, no_wrap=True)
    for name in ("ms", "PyTorch", "GFLOP/s", "of peak", "bytes/FLOP", "of bound"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("algorithm", no_wrap=True)
    table.add_column("others, ms")
    last = ""
    for row in rows:
        table.add_row(*(("", "") if row.layer == last else (row.layer, row.kind)), *_cells(row, peak))
        last = row.layer
    return table


def sums(rows: Sequence[LayerTiming]) -> list[tuple[str, float]]:
    """Return the seconds of each kind of layer and pass, the longest first."""
    seconds = defaultdict[str, float](float)
    for row in rows:
        seconds[f"{row.kind}, {row.pass_name}"] += row.seconds
    return sorted(seconds.items(), key=lambda item: -item[1])


def summary(rows: Sequence[LayerTiming], peak: Peak, setup: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each of `sums`, and lines on the `setup`, the whole time and the peak."""
    total = sum(row.seconds for row in rows)
    for name, seconds in sums(rows):
        yield f"{name:34}{1e3 * seconds:10.1f} ms{seconds / total:8.1%}"
    inputs, shares = " x ".join(map(str, setup["inputs"])), medians(rows, peak)
    yield (
        f"\n{setup['model']}, {inputs}, {setup['dtype']}, {setup['threads']} threads on {setup['processor']}: "
        f"{1e3 * total:.0f} ms in these layers, without biases and the operations between layers"
    )
    yield (
        f"peak: {peak.operations_per_second / 1e9:.0f} GFLOP/s of products, "
        f"{peak.bytes_per_second / 1e9:.1f} GB/s of memory; median convolution at "
        + ", ".join(f"{share:.0%} of its bound ({which})" for which, share in shares.items())
    )


def draw(rows: Sequence[LayerTiming], peak: Peak, title: str) -> bytes:
    """Return a bar for each layer and pass with its bound inside, as SVG."""
    panels = {
        which.value: {
            row.layer: Bar(row.seconds, row.seconds * min(1.0, row.share_of_bound(peak)))
            for row in rows
            if row.pass_name == which.value
        }
        for which in Pass
    }
    return draw_bars(panels, list(dict.fromkeys(row.layer for row in rows)), title)


def _cells(row: LayerTiming, peak: Peak) -> tuple[str, ...]:
    share = f"{row.share_of_bound(peak):.0%}{' memory' * (row.bound(peak) == 'memory')}"
    rates = "", "", ""
    if row.operations:
        rate = row.operations / row.seconds
        of_peak = f"{rate / peak.operations_per_second:.0%}"
        rates = f"{rate / 1e9:.0f}", of_peak, f"{row.least_bytes / row.operations:.3f}"
    times = {way: f"{1e3 * seconds:.2f}" for way, seconds in row.times.items()}
    others = "; ".join(f"{way} {took}" for way, took in times.items() if way not in (row.algorithm, DEFAULT))
    return row.pass_name, f"{1e3 * row.seconds:.2f}", times.get(DEFAULT, ""), *rates, share, row.algorithm, others


PEAK_LAYERS: Sequence[tuple[Callable[[], nn.Module], Shape]] = (
    (partial(nn.Linear, 2048, 2048), (2048, 2048)),
    (partial(nn.Linear, 512, 512), (16384, 512)),
    (partial(nn.Conv2d, 64, 64, 3, padding=1), (8, 64, 56, 56)),
)
"""Layers whose forward passes are the large products, with the shape of their inputs, which is that of the outputs."""

COPY_BYTES = 256 << 20
"""Bytes of the copy."""

ATTEMPTS = 5
"""Timings of a peak, of which the best counts."""


@dataclass(frozen=True)
class Peak:
    """Speed of a large product and of a large copy."""

    operations_per_second: float
    bytes_per_second: float


def measure_peak(dtype: torch.dtype) -> Peak:
    """Return the peak of products in `dtype`, and of copies. Convolutions are the library's."""
    library = ConvolutionPlan(frozen=True)
    passes = (next(_passes(BenchLayer("", make(), shape, shape), library, dtype)) for make, shape in PEAK_LAYERS)
    products = max(forward.operations / fastest(forward.call) for forward in passes)
    source = torch.ones(COPY_BYTES // 4)
    target = torch.empty_like(source)
    return Peak(products, 2 * COPY_BYTES / fastest(lambda: target.copy_(source)))


def fastest(work: Callable[[], object]) -> float:
    return min(seconds_of(work, ATTEMPTS))


STRIDED_BYTES = 32 << 20
"""Bytes of an access in blocks, without the gaps between them."""


def measure_memory() -> list[dict[str, Any]]:
    """Return named samples of the bytes per second of reads, writes, and copies, which are both (swCaffe's figure 2).

    First by size, in one stretch; then of STRIDED_BYTES by the size of their blocks, with gaps as large between them.
    """
    rows = list[dict[str, Any]]()
    for size in (4 << 10 << up for up in range(0, 16, 2)):
        rows += _accesses(f"of {format_bytes(size)}", torch.ones(size // 4))
    for block in (16 << up for up in range(0, 12, 2)):
        gapped = torch.ones(STRIDED_BYTES // block, 2 * (block // 4))
        rows += _accesses(f"in blocks of {format_bytes(block)}", gapped[:, : block // 4])
    return rows


def _accesses(name: str, memory: Tensor) -> Iterator[dict[str, Any]]:
    """Yield the rates of reads, writes and copies of a tensor, which may have gaps; what it is copied to has none."""
    size, target = memory.numel() * memory.itemsize, torch.empty(memory.shape)
    works: Mapping[str, tuple[int, Callable[[], object]]] = {
        "reads": (size, memory.sum),
        "writes": (size, memory.zero_),
        "copies": (2 * size, lambda: target.copy_(memory)),
    }
    calls = max(1, (1 << 20) // size)
    for kind, (moved, work) in works.items():
        rates = [moved * calls / seconds / 1e9 for seconds in seconds_of(work, ATTEMPTS, calls)]
        yield {"name": f"{kind} {name}", "unit": "GB/s", "samples": rates}
