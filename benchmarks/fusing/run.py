"""Batch norm, the sum of a short cut and relu: PyTorch's own, one after another, and as `torch.compile` fuses them.

python benchmarks/fusing/run.py        two minutes on 2 cores; a C++ compiler is needed
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn, relu_

from unisono.bench.layers import measure_peak
from unisono.compute.prepare import choose_dtype
from unisono.launch import keep_memory
from unisono.processor import AUTO, processor

HERE = Path(__file__).parent

SHAPES = ((64, 112), (64, 56), (256, 56), (128, 28), (512, 28), (256, 14), (1024, 14), (512, 7), (2048, 7))
"""Channels and pixels across, of ResNet-50's batch norms."""

BATCH, TIMES = 32, 5

LEAST = {"forward": 3, "backward": 5}
"""Tensors that a pass reads and writes at least: inputs, short cut, outputs; inputs, outputs, and three gradients."""

Fused = Callable[[Tensor, Tensor], Tensor]


class Tail(nn.Module):
    """The end of a block."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, inputs: Tensor, short: Tensor) -> Tensor:
        """Both of one shape."""
        return relu_(self.norm(inputs).add_(short))


def passes(tail: Fused, inputs: Tensor, short: Tensor, slope: Tensor) -> tuple[float, float]:
    """Seconds of the forward and of the backward pass."""
    begun = time.perf_counter()
    outputs = tail(inputs, short)
    between = time.perf_counter()
    torch.autograd.grad(outputs, (inputs, short), slope)
    return between - begun, time.perf_counter() - between


def measure(channels: int, size: int, dtype: torch.dtype, rate: float) -> dict[str, Any]:
    """Medians of both, by turns, and the bound."""
    shape = (BATCH, channels, size, size)
    inputs, short, slope = (
        torch.randn(shape).to(dtype).contiguous(memory_format=torch.channels_last) for _ in range(3)
    )
    inputs.requires_grad_(), short.requires_grad_()
    tail = Tail(channels)
    torch._dynamo.reset()  # a network has each layer in one shape, and is compiled for that
    fused = torch.compile(tail, dynamic=False, fullgraph=True)
    contenders: dict[str, Fused] = {"one after another": tail, "torch.compile": fused}
    for _ in range(2):
        for contender in contenders.values():
            passes(contender, inputs, short, slope)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for _ in range(TIMES):
        for name, contender in contenders.items():
            taken[name].append(passes(contender, inputs, short, slope))
    bounds = {name: count * inputs.nbytes / rate for name, count in LEAST.items()}
    seconds = {name: dict(zip(LEAST, map(list, zip(*each, strict=True)), strict=True)) for name, each in taken.items()}
    return {"channels": channels, "size": size, "seconds": seconds, "bounds": bounds}


def as_markdown(facts: dict[str, Any]) -> str:
    """Milliseconds of each pass, median (range), and how many times the bound that is."""
    setup = (
        f"{facts['processor']}, {facts['threads']} threads, PyTorch {facts['torch']}, {facts['dtype']}, batch {BATCH}"
    )
    lines = [
        "# Fusing: what was measured",
        "",
        f"{setup}; ms, median (range), and how many times the bound that is",
        "",
    ]
    head = [f"{name}, {which}" for which in LEAST for name in facts["rows"][0]["seconds"]]
    lines += [f"| shape | {' | '.join(head)} |", "| --- |" + " ---: |" * len(head)]
    for row in facts["rows"]:
        cells = []
        for which in LEAST:
            for each in row["seconds"].values():
                middle = statistics.median(each[which])
                span = f"{1e3 * min(each[which]):.1f}-{1e3 * max(each[which]):.1f}"
                cells.append(f"{1e3 * middle:.1f} ({span}), {middle / row['bounds'][which]:.1f}")
        lines.append(f"| {row['channels']} x {row['size']} x {row['size']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    keep_memory()
    dtype = choose_dtype(AUTO, torch.float32, torch.device("cpu"))
    rate = measure_peak(dtype).bytes_per_second
    rows = []
    for channels, size in SHAPES:
        print(f"{channels} x {size} x {size}", flush=True)
        rows.append(measure(channels, size, dtype, rate))
    setup = {"processor": processor().name, "threads": torch.get_num_threads(), "torch": torch.__version__}
    facts = {**setup, "dtype": str(dtype), "bytes_per_second": rate, "rows": rows}
    (HERE / "results.json").write_text(json.dumps(facts, indent=1) + "\n")
    (HERE / "summary.md").write_text(as_markdown(facts))


if __name__ == "__main__":
    main()
