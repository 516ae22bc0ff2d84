"""One contender for the training steps of a network, in a process with its own environment and memory.

    stock      float32, channels first: the unchanged model
    tuned      channels last, bfloat16 by autocast where the processor supports it: what a careful user would write
    kept       tuned, in the environment that `unisono train` gives its ranks: memory kept from step to step
    ours       in that environment, products in the same number format, channels last, each convolution by its best
               algorithm; response norms stay in that format (autocast computes them in float32)

A step is forward, loss, backward and SGD with momentum, on random images. All start with the same weights.

Started as  python -m unisono.bench.contender NETWORK CONTENDER BATCH.  The first input line holds the known timings
of algorithms; each further line requests a step. The answer is a line of JSON: the step's seconds, and the peak memory
of the process in it. When the input ends, it prints the timings of algorithms that it has measured.
"""

from __future__ import annotations

import json
import re
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from unisono.compute import AUTO
from unisono.compute.convolution_plan import ConvolutionPlan
from unisono.compute.prepare import StepContext, autocast_to, choose_dtype, prepare, release_free_memory
from unisono.models import input_shape, make_network
from unisono.processor import processor
from unisono.training.accuracy import classification_loss

STOCK, TUNED, KEPT_MEMORY, OURS = "stock", "tuned", "kept", "ours"
CONTENDERS = (STOCK, TUNED, KEPT_MEMORY, OURS)
WITH_KEPT_MEMORY = (KEPT_MEMORY, OURS)
"""Contenders whose memory is kept from step to step."""

CLASSES = 1000


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
    dtype = choose_dtype(AUTO, torch.float32, "cpu", processor())
    if contender in (TUNED, KEPT_MEMORY):
        model = model.to(memory_format=torch.channels_last)
    else:
        prepare(model, plan)
    return Contender(model, inputs, labels, lambda: autocast_to(dtype, torch.float32, "cpu"))


def serve(name: str, contender: str, batch: int) -> None:
    """Make a step for each line on standard input except the first, and answer on standard output."""
    plan = ConvolutionPlan(json.loads(sys.stdin.readline()))
    one = make(name, contender, batch, plan)
    for number, _ in enumerate(sys.stdin):
        if contender in WITH_KEPT_MEMORY and number == 1:
            release_free_memory()  # as a run does after the step in which algorithms are timed
        reset_peak()
        took = one.step()
        print(json.dumps({"seconds": took, "peak_bytes": peak_bytes()}), flush=True)
    print(json.dumps(plan.measured), flush=True)


def reset_peak() -> None:
    """Reset the peak that `peak_bytes` returns (Linux: proc_pid_clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Return the peak resident memory of this process, in bytes."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found, "Linux has this line"
    return 1024 * int(found[1])


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], int(sys.argv[3]))
