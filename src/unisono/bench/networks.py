"""Training and scoring by the papers' networks: images/s and memory, ours beside stock PyTorch (swCaffe's table 3).

    stock      float32, channels first: the unchanged model
    tuned      channels last, bfloat16 by autocast where the processor supports it: what a careful user would write
    kept       tuned, in the environment that `unisono train` gives its ranks: memory kept from step to step
    ours       in that environment, products in the same number format, channels last, each convolution by its best
               algorithm; response norms stay in that format (autocast computes them in float32)

A step is forward, loss, backward and SGD with momentum, on random images; scoring is the forward pass alone, as in
evaluation, after each step (PCL-DNN's figure 3). All start with the same weights. Each contender is a separate process,
with its own environment and memory; they run their steps in turn, while the others wait.

Started as  python -m unisono.bench.networks NETWORK CONTENDER BATCH.  The first input line holds the known timings
of algorithms; each further line requests a step. The answer is a line of JSON: the seconds of the step and of scoring,
and the peak memory of the process in the step. When the input ends, it prints the timings of algorithms.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from unisono.compute.convolution_plan import ConvolutionPlan
from unisono.compute.prepare import StepContext, autocast_to, choose_dtype, prepare, release_free_memory
from unisono.errors import UsageError
from unisono.formats import markdown_table
from unisono.launch import MALLOC_ENVIRONMENT
from unisono.models import input_shape, make_network
from unisono.processor import AUTO
from unisono.startup import remove_leftover_files
from unisono.training.accuracy import classification_loss

CONTENDERS = STOCK, TUNED, KEPT_MEMORY, OURS = "stock", "tuned", "kept", "ours"
WITH_KEPT_MEMORY = (KEPT_MEMORY, OURS)
"""Contenders whose memory is kept from step to step."""

CLASSES = 1000

WARMUP_STEPS = 5
"""First steps, which are not counted: algorithms are timed, and memory grows until freed blocks fit new requests."""


@dataclass
class Contender:
    """A network with its inputs, optimizer and number format."""

    model: nn.Module
    inputs: Tensor
    labels: Tensor
    within: StepContext

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3, momentum=0.9)

    def step(self) -> float:
        """Make a step. Return its seconds."""
        begun = time.perf_counter()
        with self.within():
            loss = classification_loss(self.model(self.inputs), self.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - begun

    def score(self) -> float:
        """Compute the scores alone. Return the seconds."""
        self.model.eval()
        begun = time.perf_counter()
        with torch.no_grad(), self.within():
            self.model(self.inputs)
        seconds = time.perf_counter() - begun
        self.model.train()
        return seconds


def make(name: str, contender: str, batch: int, plan: ConvolutionPlan) -> Contender:
    """Return a network as one of the contenders runs it."""
    torch.manual_seed(0)
    shape = (batch, *input_shape(name))
    model = make_network(name, "", CLASSES, shape[1])
    model.train()
    inputs, labels = torch.randn(shape), torch.randint(CLASSES, (batch,))
    if contender == STOCK:
        return Contender(model, inputs, labels, nullcontext)
    inputs = inputs.contiguous(memory_format=torch.channels_last)
    dtype = choose_dtype(AUTO, torch.float32, torch.device("cpu"))
    if contender in (TUNED, KEPT_MEMORY):
        model = model.to(memory_format=torch.channels_last)
    else:
        prepare(model, plan)
    return Contender(model, inputs, labels, lambda: autocast_to(dtype, torch.float32, "cpu"))


def serve(name: str, contender: str, batch: int) -> None:
    """Make a step for each line on standard input except the first, and answer on standard output."""
    plan = ConvolutionPlan(json.loads(sys.stdin.readline()))
    trained = make(name, contender, batch, plan)
    for step, _ in enumerate(sys.stdin):
        if contender in WITH_KEPT_MEMORY and step == 1:
            release_free_memory()  # as a run does after the step in which algorithms are timed
        reset_peak()
        answer = {"seconds": trained.step(), "peak_bytes": peak_bytes(), "scoring": trained.score()}
        print(json.dumps(answer), flush=True)
    print(json.dumps(plan.measured), flush=True)


def reset_peak() -> None:
    """Reset the peak that `peak_bytes` returns (Linux: proc_pid_clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Return the peak resident memory of this process, in bytes."""
    line = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert line, "Linux has this line"
    return 1024 * int(line[1])


class ContenderProcess:
    """Contender in a process of its own."""

    def __init__(self, name: str, contender: str, batch: int, measured: Mapping[str, Mapping[str, float]]) -> None:
        command = [sys.executable, "-P", "-m", "unisono.bench.networks", name, contender, str(batch)]
        plain = {key: value for key, value in os.environ.items() if key not in MALLOC_ENVIRONMENT}
        environment = {**plain, **MALLOC_ENVIRONMENT} if contender in WITH_KEPT_MEMORY else plain
        self._begun = time.time()
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._name = f"{contender} of {name}"
        self._send(json.dumps(measured))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(BrokenPipeError), self.process:  # closed, its input sends what it has not read
            self.process.kill()
        remove_leftover_files(self._begun)  # MPI's, of which a process that is killed removes none

    def step(self) -> dict[str, float]:
        """Request a step. Return its `seconds`, `peak_bytes` of the process's memory, and the seconds of `scoring`."""
        self._send("")
        return self._receive()

    def plan(self) -> dict[str, Any]:
        """End the process. Return the timings of algorithms that it has measured."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self._receive()

    def _send(self, line: str) -> None:
        with suppress(BrokenPipeError):  # it has ended: `_receive` reports it
            print(line, file=self.process.stdin, flush=True)

    def _receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            raise UsageError(f"{self._name} ended with exit code {code}, see above; try a smaller --batch")
        answer: dict[str, Any] = json.loads(line)
        return answer


def measure_networks(
    names: Sequence[str], batch: int, steps: int, plan: ConvolutionPlan, log: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return the seconds of `steps` steps and of scoring, and the peak memory of a step, by network and contender.

    The WARMUP_STEPS first steps are not counted. Timings of algorithms are added to `plan`.
    """
    results = []
    for name in names:
        times = {work: {contender: list[float]() for contender in CONTENDERS} for work in ("seconds", "scoring")}
        peak = dict.fromkeys(CONTENDERS, 0)
        with ExitStack() as stack:
            started = {
                contender: stack.enter_context(ContenderProcess(name, contender, batch, plan.measured))
                for contender in CONTENDERS
            }
            for step in range(1 - WARMUP_STEPS, 1 + steps):
                for contender, process in started.items():
                    log(f"{name}: step {max(0, step)} of {steps}, {contender}")
                    result = process.step()
                    if step > 0:
                        for work, each in times.items():
                            each[contender].append(result[work])
                        peak[contender] = max(peak[contender], int(result["peak_bytes"]))
            plan.measured.update(started[OURS].plan())
        results.append({"network": name, "batch": batch, **times, "peak_bytes": peak})
    return results


def as_markdown(results: Sequence[dict[str, Any]]) -> str:
    """Return a table: images/s of each contender, median and range, ratios of ours to the others, memory, scoring."""
    peers = CONTENDERS[:-1]
    beside, memory = [f"ours / {peer}" for peer in peers], [f"memory: {name}" for name in CONTENDERS]
    head = ["network", "batch", *CONTENDERS, *beside, *memory, *(f"scoring: {name}" for name in (STOCK, OURS))]
    rows = []
    for row in results:
        batch, seconds = row["batch"], row["seconds"]
        middle = {name: statistics.median(seconds[name]) for name in CONTENDERS}
        rates = [_rate(batch, seconds[name]) for name in CONTENDERS]
        ratios = [f"{middle[peer] / middle[OURS]:.2f}" for peer in peers]
        taken = [f"{row['peak_bytes'][name] / 1e9:.2f} GB" for name in CONTENDERS]
        scoring = [_rate(batch, row["scoring"][name]) if "scoring" in row else "" for name in (STOCK, OURS)]
        rows.append([row["network"], str(batch), *rates, *ratios, *taken, *scoring])
    return "\n".join(markdown_table(head, rows))


def _rate(batch: int, seconds: Sequence[float]) -> str:
    """Return images per second: the median, and the range."""
    return f"{batch / statistics.median(seconds):.2f} ({batch / max(seconds):.2f}-{batch / min(seconds):.2f})"


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], int(sys.argv[3]))
