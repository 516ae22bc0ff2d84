"""Training steps of the seeds' networks: pictures a second, ours beside stock PyTorch, by turns (swCaffe's table 3).

    stock      float32, channels first, as a model is that nobody has changed
    tuned      channels last, bfloat16 by autocast where the processor is made for it: what a careful user would write
    ours       the same number format, channels last, each convolution by its best way

A step is forward, loss, backward and SGD with momentum, on random pictures. All start with the same weights.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unisono.compute.convolution_plan import ConvolutionPlan
from unisono.compute.formats import AUTO
from unisono.compute.precision import choose, products_in
from unisono.compute.prepare import prepare
from unisono.compute.processor import processor
from unisono.models.table import make_network
from unisono.training.loss import classification_loss

STOCK, TUNED, OURS = "stock", "tuned", "ours"
CONTENDERS = (STOCK, TUNED, OURS)

NETWORKS = ("alexnet", "vgg16", "vgg19", "resnet50", "googlenet")
"""Those of swCaffe's table 3."""

SHAPES = {
    "overfeat_fast": (3, 231, 231),
    "small_convnet": (1, 8, 8),
    **{f"resnet{layers}": (3, 32, 32) for layers in (8, 20, 32, 44, 56, 110)},
    "cd_dnn": (440,),
}
"""Of a sample, where it is not a picture of 224 x 224."""

CLASSES = 1000


def shape_of(name: str, batch: int, size: int = 0) -> tuple[int, ...]:
    """The shape of a network's inputs, as its paper has them, or `size` pixels across."""
    shape = SHAPES.get(name, (3, 224, 224))
    return (batch, *shape) if not size or len(shape) == 1 else (batch, shape[0], size, size)


@dataclass
class Contender:
    """One way of making a network's steps."""

    model: nn.Module
    inputs: Tensor
    labels: Tensor
    within: Callable[[], AbstractContextManager[object]]

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3, momentum=0.9)

    def step(self) -> float:
        """Make a step; its seconds."""
        begun = time.perf_counter()
        with self.within():
            loss = classification_loss(self.model(self.inputs), self.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - begun


def make(name: str, contender: str, batch: int, plan: ConvolutionPlan) -> Contender:
    """A network as one of the contenders has it."""
    torch.manual_seed(0)
    shape = shape_of(name, batch)
    model = make_network(name, "", CLASSES, shape[1])
    model.train()
    inputs, labels = torch.randn(shape), torch.randint(CLASSES, (batch,))
    if contender == STOCK:
        return Contender(model, inputs, labels, nullcontext)
    inputs = inputs.contiguous(memory_format=torch.channels_last)
    dtype = choose(AUTO, torch.float32, "cpu", processor())
    if contender == TUNED:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    else:
        prepare(model, plan)
    return Contender(model, inputs, labels, lambda: products_in(dtype, torch.float32, "cpu"))


def measure_networks(
    names: Sequence[str], batch: int, steps: int, plan: ConvolutionPlan, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """For each network and contender the seconds of `steps` steps, by turns, after one that is not counted."""
    found = []
    for name in names:
        seconds: dict[str, list[float]] = {}
        contenders = {contender: make(name, contender, batch, plan) for contender in CONTENDERS}
        for number in range(1 + steps):
            for contender, one in contenders.items():
                say(f"{name}: step {number} of {steps}, {contender}")
                took = one.step()
                if number:
                    seconds.setdefault(contender, []).append(took)
        found.append({"network": name, "batch": batch, "seconds": seconds})
    return found


def as_markdown(found: Sequence[dict[str, Any]]) -> str:
    """Pictures a second of each contender, median and range, and what ours is beside the others."""
    head = ["network", "batch", *CONTENDERS, "ours / stock", "ours / tuned"]
    lines = [f"| {' | '.join(head)} |", "| --- |" + " ---: |" * (len(head) - 1)]
    for row in found:
        batch, seconds = row["batch"], row["seconds"]
        middle = {name: statistics.median(seconds[name]) for name in CONTENDERS}
        rates = [
            f"{batch / middle[name]:.2f} ({batch / max(seconds[name]):.2f}-{batch / min(seconds[name]):.2f})"
            for name in CONTENDERS
        ]
        ratios = [f"{middle[peer] / middle[OURS]:.2f}" for peer in (STOCK, TUNED)]
        lines.append(f"| {' | '.join([row['network'], str(batch), *rates, *ratios])} |")
    return "\n".join(lines)
