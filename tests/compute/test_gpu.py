"""Computation on a GPU."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from unisono.compute import convolution_plan
from unisono.compute.convolution_plan import ConvolutionPlan
from unisono.compute.prepare import autocast_to, choose_dtype, prepare

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU here")


def test_a_step_on_the_gpu_equals_one_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution_plan, "MIN_AUTOTUNED_OPERATIONS", 0)
    torch.manual_seed(0)
    here = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.LocalResponseNorm(5), nn.ReLU(), nn.Conv2d(16, 16, 1), nn.Flatten(),
        nn.Linear(16 * 64, 10),
    )  # fmt: skip
    there = copy.deepcopy(here).to("cuda")
    prepare(there, ConvolutionPlan())
    inputs, labels = torch.randn(4, 3, 8, 8), torch.arange(4)
    dtype = choose_dtype("auto", torch.float32, torch.device("cuda"))
    assert dtype == torch.bfloat16
    cross_entropy(here(inputs), labels).backward()
    with autocast_to(dtype, torch.float32, "cuda"):
        loss = cross_entropy(there(inputs.to("cuda")), labels.to("cuda"))
    loss.backward()
    for parameter, right in zip(there.parameters(), here.parameters(), strict=True):
        assert parameter.grad is not None
        assert right.grad is not None
        torch.testing.assert_close(parameter.grad.cpu(), right.grad, rtol=0.05, atol=0.01)
