"""Training steps of the seeds' networks, their memory, and the layers of two of them.

python benchmarks/networks/run.py                        all
python benchmarks/networks/run.py steps layers:vgg16     some of: steps, layers, and either of one network
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from unisono.bench.layers import as_data, draw, layers_of, measure_layers, measure_peak
from unisono.bench.networks import CLASSES, CONTENDERS, as_markdown, measure_networks
from unisono.compute.convolution_plan import ConvolutionPlan
from unisono.compute.prepare import choose_dtype
from unisono.launch import keep_memory
from unisono.models import input_shape, make_network
from unisono.processor import AUTO, processor

HERE = Path(__file__).parent
NAMES = ("resnet50", "vgg16", "alexnet", "googlenet")
BATCH, STEPS = 32, 5
REPORTED = ("vgg16", "resnet50")


def main(parts: list[str]) -> None:
    keep_memory()
    for part in parts or ["steps", "layers"]:
        what, _, name = part.partition(":")
        measure, names = {"steps": (steps, NAMES), "layers": (layers, REPORTED)}[what]
        for network in [name] if name else names:
            measure(network)
            write_summary()


def about() -> dict[str, object]:
    here = processor()
    machine = {"processor": here.name, "bfloat16": here.bfloat16, "threads": torch.get_num_threads()}
    return {**machine, "torch": torch.__version__}


def described(results: dict[str, Any]) -> str:
    products = "bfloat16" if results["bfloat16"] else "float32 only"
    return f"{results['processor']} ({products}), {results['threads']} threads, PyTorch {results['torch']}"


def steps(name: str) -> None:
    plan = ConvolutionPlan()
    (timing,) = measure_networks([name], BATCH, STEPS, plan, tell)
    keep(f"steps_{name}", {**about(), **timing, "plan": plan.measured})


def layers(name: str) -> None:
    dtype = choose_dtype(AUTO, torch.float32, torch.device("cpu"))
    shape = (BATCH, *input_shape(name))
    network_layers = layers_of(make_network(name, "", CLASSES, 3), shape)
    peak = measure_peak(dtype)
    rows = measure_layers(network_layers, ConvolutionPlan(), dtype, tell)
    keep(f"layers_{name}", as_data(rows, peak, {**about(), "model": name, "inputs": shape, "dtype": str(dtype)}))
    (HERE / f"layers_{name}.svg").write_bytes(draw(rows, peak, f"{name}, batch {BATCH}"))


def tell(line: str) -> None:
    print(line, flush=True)


def write_summary() -> None:
    lines = ["# Networks: what was measured", ""]
    found_steps = [result for name in NAMES if (result := read(f"steps_{name}"))]
    if measured := [result for result in found_steps if result["seconds"].keys() >= set(CONTENDERS)]:
        machines = "; ".join(sorted({described(result) for result in measured}))
        lines += [f"{machines}; images/s, median (range)", "", as_markdown(measured), ""]
    for name in REPORTED:
        if (result := read(f"layers_{name}")) is not None:
            lines += [f"{name}: median convolution's share of its bound, and how often each algorithm is chosen", ""]
            lines += ["| pass | share | algorithms |", "| --- | ---: | --- |"]
            for which, share in result["medians"].items():
                chosen = [row["algorithm"] for row in result["rows"] if row["pass_name"] == which and row["algorithm"]]
                counted = sorted(((chosen.count(name), name) for name in set(chosen)), reverse=True)
                lines.append(f"| {which} | {share:.0%} | {', '.join(f'{count} {name}' for count, name in counted)} |")
            peak = result["peak"]
            lines += [
                "",
                f"Peak: {peak['operations_per_second'] / 1e9:.0f} GFLOP/s, {peak['bytes_per_second'] / 1e9:.1f} GB/s",
                "",
            ]
    (HERE / "summary.md").write_text("\n".join(lines))


def keep(name: str, results: dict[str, object]) -> None:
    (HERE / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")


def read(name: str) -> dict[str, Any] | None:
    path = HERE / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


if __name__ == "__main__":
    main(sys.argv[1:])
