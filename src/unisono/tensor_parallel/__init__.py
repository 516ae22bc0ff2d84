"""Tensor parallelism: layers split over groups of ranks, inside data parallelism (hybrid).

    unisono.parallel(model, world, plan={"fc1": "column 2 gives part", "fc2": "row 2 takes part"})

plan and groups are pure functions on data (`plan.py`, `check.py`, `groups.py`, `part.py`); layers follow them
(`linear.py`, `convolution.py`, `embeddings.py`, `dropout.py`), with collectives on activations (`activations.py`),
beside products where they are large (`overlap/`).
"""

from typing import TYPE_CHECKING

from unisono.registry import lazy_attributes

if TYPE_CHECKING:
    from unisono.tensor_parallel.choose_plan import PlanChoice, choose_plan
    from unisono.tensor_parallel.gain import LayerGain, describe_gain, measure_gain
    from unisono.tensor_parallel.model import data_world, seed_dropout
    from unisono.tensor_parallel.norms import clip_grad_norm
    from unisono.tensor_parallel.plan import ParallelPlan, Split, make_plan
    from unisono.tensor_parallel.whole_state import cut_optimizer_state, whole_optimizer_state, whole_state_dict

__all__ = [
    "LayerGain",
    "ParallelPlan",
    "PlanChoice",
    "Split",
    "choose_plan",
    "clip_grad_norm",
    "cut_optimizer_state",
    "data_world",
    "describe_gain",
    "make_plan",
    "measure_gain",
    "seed_dropout",
    "whole_optimizer_state",
    "whole_state_dict",
]

_HOMES = {
    "LayerGain": "unisono.tensor_parallel.gain",
    "ParallelPlan": "unisono.tensor_parallel.plan",
    "PlanChoice": "unisono.tensor_parallel.choose_plan",
    "Split": "unisono.tensor_parallel.plan",
    "choose_plan": "unisono.tensor_parallel.choose_plan",
    "clip_grad_norm": "unisono.tensor_parallel.norms",
    "cut_optimizer_state": "unisono.tensor_parallel.whole_state",
    "data_world": "unisono.tensor_parallel.model",
    "describe_gain": "unisono.tensor_parallel.gain",
    "make_plan": "unisono.tensor_parallel.plan",
    "measure_gain": "unisono.tensor_parallel.gain",
    "seed_dropout": "unisono.tensor_parallel.model",
    "whole_optimizer_state": "unisono.tensor_parallel.whole_state",
    "whole_state_dict": "unisono.tensor_parallel.whole_state",
}

__getattr__ = lazy_attributes(__name__, _HOMES)
