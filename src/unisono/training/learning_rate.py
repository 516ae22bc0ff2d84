"""The learning rate of each step: a pure function of the progress of a run, so that a resumed run continues exactly.

    goal ┤     ╱▔▔▔▔▔╲         goal          learning_rate; with for_batch, learning_rate x batch / for_batch
         │   ╱        ╲        warm start    straight to the goal: from learning_rate with for_batch, else from 0
         │ ╱           ╲       constant      goal
         └──────┬───────▶      steps         goal x decay ^ (how many times `every` epochs are over)
          warm  │ policy       polynomial    goal x (1 - done) ^ power
          start │              cosine        goal x (1 + cos(pi done)) / 2

`done` is the share of the epochs after the warm start that is over; `every` counts from the beginning of the run.

DIMD (section 5, after Goyal et al. 2017) begins at 0.1, climbs in 5 epochs to 0.1 k n / 256, with k samples on each of
n GPUs, and divides by 10 after every 30 of 90: learning_rate = 0.1, for_batch = 256, warm_epochs = 5, policy = "steps",
every = 30, and training.batch is k n. For 8,192 samples:

    epoch    0     2.5    5      29.9   30     60      89.9
    rate     0.1   1.65   3.2    3.2    0.32   0.032   0.032

Theano-MPI's GoogLeNet has "polynomial" with power = 0.5, its AlexNet "steps" with every = 20 (section 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unisono.training.recipe import OptimizerRecipe  # it has the names of the policies


def rate_at(options: OptimizerRecipe, epoch: float, epochs: float, batch: int) -> float:
    """Return the learning rate after `epoch` of `epochs` epochs (3.5: three and a half; fewer than `epochs`).

    `batch` is the samples of a step whose gradients an update applies: over all ranks together, or a worker's own.
    """
    goal = options.learning_rate * batch / options.for_batch if options.for_batch else options.learning_rate
    if epoch < options.warm_epochs:
        begin = min(options.learning_rate, goal) if options.for_batch else 0.0
        return begin + (goal - begin) * epoch / options.warm_epochs
    return goal * POLICIES[options.policy](options, epoch, epochs)


def rate_of_step(options: OptimizerRecipe, epoch: int, step: int, steps: int, epochs: int, batch: int) -> float:
    """Return the rate of step `step` of the `steps` of an epoch, both from 0, taken at the middle of that step."""
    return rate_at(options, epoch + (step + 0.5) / steps, epochs, batch)


def _done(options: OptimizerRecipe, epoch: float, epochs: float) -> float:
    return (epoch - options.warm_epochs) / (epochs - options.warm_epochs)


POLICIES: dict[str, Callable[[OptimizerRecipe, float, float], float]] = {
    "constant": lambda *_: 1.0,
    "steps": lambda options, epoch, epochs: options.decay ** math.floor(epoch / (options.every or epochs / 3)),
    "polynomial": lambda options, epoch, epochs: (1 - _done(options, epoch, epochs)) ** options.power,
    "cosine": lambda options, epoch, epochs: (1 + math.cos(math.pi * _done(options, epoch, epochs))) / 2,
}
"""Functions that return the share of the goal after `epoch` of `epochs` epochs, once the warm-up is over."""
