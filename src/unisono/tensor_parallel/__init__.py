"""Hybrid parallelism: each layer has its own, data parallel or split over groups of ranks (PCL-DNN 3.2 to 3.4).

    unisono.parallel(model, world, plan={"fc1": "column 2 gives part", "fc2": "row 2 takes part"})

A plan is data, made and checked by pure functions (`plan.py`, `check.py`); layers follow it (`layers.py`).
Every rank has its own samples; a split layer exchanges activations with its group (`layouts.py`).
"""

from typing import TYPE_CHECKING

from unisono.registry import lazy_attributes

if TYPE_CHECKING:
    from unisono.tensor_parallel.choose_plan import PlanChoice, choose_plan
    from unisono.tensor_parallel.model import (
        clip_grad_norm,
        cut_optimizer_state,
        seed_dropout,
        whole_optimizer_state,
        whole_state_dict,
    )
    from unisono.tensor_parallel.plan import ParallelPlan, Split, make_plan

__all__ = [
    "ParallelPlan",
    "PlanChoice",
    "Split",
    "choose_plan",
    "clip_grad_norm",
    "cut_optimizer_state",
    "make_plan",
    "seed_dropout",
    "whole_optimizer_state",
    "whole_state_dict",
]

_MODULES = {
    "choose_plan": ("PlanChoice", "choose_plan"),
    "model": ("clip_grad_norm", "cut_optimizer_state", "seed_dropout", "whole_optimizer_state", "whole_state_dict"),
    "plan": ("ParallelPlan", "Split", "make_plan"),
}

__getattr__ = lazy_attributes(
    __name__, {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}
)
