"""Parts of the parameters of split layers: who holds the same part averages it.

4 ranks with own samples; layer A is split over the groups {0, 1} and {2, 3}, layer B over none:

    rank        0    1    2    3          summed over               weight of a rank
    A           a0   a1   a0   a1         {0, 2} and {1, 3}         samples of its group / samples of all
    B           b    b    b    b          all four                  samples of the rank / samples of all

The gradient of a part is a mean over the samples of the group, by which its layers weigh the losses of its ranks
(`tensor_parallel/layouts.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch

from unisono.engine.communicator_pool import ModelCollectives
from unisono.optimizers.layerwise import ParameterStep, norm
from unisono.placement import Partition, holders_of
from unisono.world import World


@dataclass(frozen=True)
class ParameterParts:
    """Number of parts of each trainable parameter, and the groups of ranks that hold all parts of one."""

    counts: tuple[int, ...] = ()
    """Number of parts of each parameter, by its index; 1: every rank holds it whole. Empty: all are whole."""
    groups: Mapping[int, Partition] = field(default_factory=dict)
    """Groups whose member k holds part k, by the number of parts (2 or more)."""

    @cached_property
    def holders(self) -> Mapping[int, Partition]:
        """Ranks that hold the same part, for each part, by the number of parts."""
        return {count: holders_of(groups) for count, groups in self.groups.items()}

    def of(self, index: int) -> int:
        """Return the number of parts of a parameter: each is on one p-th of all ranks, a whole one on all."""
        return self.counts[index] if self.counts else 1

    def weight(self, weights: Sequence[float], rank: int, count: int, mean: bool) -> float:
        """Return the factor of gradients with `count` parts, of the mean of this rank's group: the group's share of the
        `weights` of all ranks' losses in a `mean`, the number of its losses that count in a sum."""
        ranks = next((group for group in self.groups.get(count, ()) if rank in group), (rank,))
        group, total = [weights[rank] for rank in ranks], sum(weights)
        if mean:
            return sum(group) / total if total else 0.0
        return float(sum(weight > 0 for weight in group))

    def holders_of(self, index: int, rank: int, ranks: int) -> Sequence[int]:
        """Return the ranks, of so many, that hold the same part of a parameter as `rank`."""
        groups = self.holders.get(self.of(index), ())
        return next((group for group in groups if rank in group), range(ranks))

    def sum_norms(
        self, parameters: Sequence[torch.Tensor], world: World | ModelCollectives, steps: Iterable[ParameterStep]
    ) -> list[ParameterStep]:
        """Return the steps of an optimizer of `parameters` with the norms of whole layers, of some of which this rank
        has measured a part: squares are summed as in `norm_of_all`. Called by all ranks together, with as many layers
        each."""
        measured, on_host = list(steps), partial(torch.tensor, dtype=torch.float64, device="cpu")
        counts = {id(parameter): self.of(index) for index, parameter in enumerate(parameters)}
        layers = [step for step in measured if step.norms is not None and id(step.parameter) in counts]
        shares = on_host([[counts[id(step.parameter)]] for step in layers]) / world.size
        squares = world.allreduce(on_host([step.norms for step in layers]).square() * shares)
        norms = {id(step.parameter): (w, d) for step, (w, d) in zip(layers, squares.sqrt().tolist(), strict=True)}
        return [step._replace(norms=norms.get(id(step.parameter), step.norms)) for step in measured]


UNSPLIT = ParameterParts()
"""No parameter is split."""


def norm_of_all(gradients: Iterable[tuple[torch.Tensor | None, int]], world: World) -> torch.Tensor:
    """Return the norm of all gradients together, with their numbers of parts, of which each counts once. Called by all
    ranks together.

        rank 0   a half 3, the rest 12  ┐  sum of squares over 2 ranks, whole ones divided by 2
        rank 1   a half 4, the rest 12  ┴  9 + 16 + 144 = 169, norm 13 on both
    """
    total = torch.zeros((), dtype=torch.float64, device="cpu")
    for gradient, parts in gradients:
        if gradient is not None:
            total += norm(gradient).cpu().double().square() * parts / world.size
    return world.allreduce(total).sqrt()
