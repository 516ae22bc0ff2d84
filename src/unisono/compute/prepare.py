"""Prepares a model for the fastest known computation; its parameters and names stay as they are.

convolutions               follow a plan
local response norms       channels last
parameters                 stay contiguous, as gradients meet in memory of that order
"""

from __future__ import annotations

from torch import nn

from unisono.compute.convolution import plan_convolutions
from unisono.compute.convolution_plan import ConvolutionPlan
from unisono.compute.response_norm import use_response_norms


def prepare(model: nn.Module, plan: ConvolutionPlan) -> nn.Module:
    """Make the layers of `model` compute so, convolutions by `plan`. Return the model; feed it channels-last inputs."""
    plan_convolutions(model, plan)
    use_response_norms(model)
    return model
