"""Hybrid parallelism: each layer has its own, data parallel or split over groups of ranks (PCL-DNN 3.2 to 3.4).

    unisono.parallel(model, world, plan={"fc1": "column 2 gives part", "fc2": "row 2 takes part"})

Every rank has its own samples; a split layer exchanges activations with its group: `docs/tensor_parallel.md`.
"""

from unisono.plan.layer_plan import ParallelPlan, Split, make_plan
from unisono.tensor_parallel.model import (
    clip_grad_norm,
    cut_optimizer_state,
    seed_dropout,
    whole_optimizer_state,
    whole_state_dict,
)

__all__ = [
    "ParallelPlan",
    "Split",
    "clip_grad_norm",
    "cut_optimizer_state",
    "make_plan",
    "seed_dropout",
    "whole_optimizer_state",
    "whole_state_dict",
]
