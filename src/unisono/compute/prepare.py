"""Preparation of a model for the fastest known computation; its parameters and names do not change.

convolutions               follow a plan
local response norms       channels last
parameters                 stay contiguous, as gradient buckets need that order
"""

from __future__ import annotations

from torch import nn

from unisono.compute.convolution import plan_convolutions
from unisono.compute.convolution_plan import ConvolutionPlan
from unisono.compute.response_norm import use_response_norms


def prepare(model: nn.Module, plan: ConvolutionPlan) -> nn.Module:
    """Change the layers of `model` as listed above, convolutions by `plan`. Return it; use channels-last inputs."""
    plan_convolutions(model, plan)
    use_response_norms(model)
    return model
