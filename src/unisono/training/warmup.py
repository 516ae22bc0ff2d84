"""Warm-up step before the first, on every rank: it times the algorithms of each convolution; the ranks take the best.

    rank 0   forward, backward on zeros: each algorithm timed ┐
    rank 1   forward, backward on zeros: each algorithm timed ┴ the slowest rank's time of each ─ the best, on all ranks

The ranks time them at the same time, since the time of an algorithm depends on how much memory the others read.
The step leaves no trace: gradients, the buffers of norms, and the memory of algorithms not chosen are reset.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from unisono.compute.convolution_plan import ConvolutionPlan, merge
from unisono.compute.prepare import release_free_memory
from unisono.world import World


def warm_up(
    model: nn.Module, step: Callable[[Tensor], Tensor], inputs: Tensor, plan: ConvolutionPlan, world: World
) -> None:
    """Settle `plan` on all ranks of `world`.

    `step` returns the loss of `model` for this rank's inputs. All ranks call it together.
    """
    if len(inputs):
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        model.train()
        step(inputs).backward()  # type: ignore[no-untyped-call]
        for buffer, before in buffers:
            buffer.copy_(before)
        model.zero_grad(set_to_none=True)
        release_free_memory()
    plan.freeze(merge(world.all_gather_object(plan.measured)))
