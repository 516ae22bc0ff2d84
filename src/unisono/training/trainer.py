"""One step of training and one look at a test set, on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.nn.functional import cross_entropy

from unisono.data.dataset import Samples
from unisono.gradients import gradients_of
from unisono.rules import BSP
from unisono.schedules.pieces import bounds
from unisono.training.recorder import Recorder
from unisono.world import World

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Trainer:
    """Trains `model` with `optimizer` under `rule` on the ranks of `world`.

    `loss` takes scores and labels and gives their mean over the samples. A model that `unisono.parallel` has seen
    already stays as it is.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        rule: BSP,
        world: World,
        loss: Loss = cross_entropy,
    ) -> None:
        self.model, self.optimizer, self.world, self.loss = model, optimizer, world, loss
        self.recorder = Recorder()
        self._gradients = gradients_of(model) or rule.attach(model, world)

    def step(self, inputs: torch.Tensor, labels: torch.Tensor) -> float:
        """Train on this rank's share of a batch, which may be empty; the sum of the loss over its samples."""
        start = time.perf_counter()
        gradients, samples = self._gradients, len(labels)
        waited, communicated = gradients.waiting, gradients.communicating
        gradients.zero()
        total = 0.0
        if samples:
            self.model.train()
            loss = self.loss(self.model(inputs), labels)
            gradients.samples = float(samples)
            loss.backward()  # type: ignore[no-untyped-call]
            total = float(loss.detach()) * samples
        else:
            gradients.exchange()
        self.optimizer.step()
        waited, communicated = gradients.waiting - waited, gradients.communicating - communicated
        self.recorder.waiting += waited
        self.recorder.communicating += communicated
        self.recorder.computing += time.perf_counter() - start - waited - communicated
        return total

    def evaluate(self, samples: Samples, batch: int) -> float:
        """The share of `samples` that the model gets right: each rank looks at its part, each sample is seen once.

        Buffers (running means of batch norm) are rank 0's from here on, as they are in checkpoints.
        """
        for buffer in self.model.buffers():
            self.world.broadcast(buffer)
        start, stop = bounds(len(samples), self.world.size, self.world.rank)
        right = torch.zeros(1, dtype=torch.int64)
        self.model.eval()
        with self.recorder.record("computing"), torch.no_grad():
            for first in range(start, stop, batch):
                part = slice(first, min(stop, first + batch))
                guesses = self.model(samples.inputs[part]).argmax(dim=1)
                right += (guesses == samples.labels[part]).sum()
        with self.recorder.record("communicating"):
            self.world.allreduce(right)
        return int(right) / len(samples)
