"""Preparation of a model."""

import torch
from torch import nn

from unisono.compute.convolution import PlannedConvolution
from unisono.compute.convolution_plan import ConvolutionPlan
from unisono.compute.prepare import prepare
from unisono.compute.response_norm import ResponseNorm


def test_layers_change_and_parameters_stay() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.LocalResponseNorm(3), nn.Sequential(nn.Conv2d(4, 4, 1)))
    before = {name: (one, one.stride()) for name, one in model.named_parameters()}
    inputs = torch.randn(2, 3, 6, 6)
    right = model(inputs)
    assert prepare(model, ConvolutionPlan()) is model
    assert [type(one) for one in model[:2]] == [PlannedConvolution, ResponseNorm]
    assert isinstance(model[2][0], PlannedConvolution)
    assert {name: (one, one.stride()) for name, one in model.named_parameters()} == before
    torch.testing.assert_close(model(inputs), right)
