"""Steps of a contender."""

import pytest
import torch

from unisono.bench.contender import CONTENDERS, Contender, make, peak_bytes, reset_peak
from unisono.compute import convolution_plan
from unisono.compute.convolution_plan import ConvolutionPlan


def test_all_make_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution_plan, "MIN_AUTOTUNED_OPERATIONS", 0)
    plan = ConvolutionPlan()
    changes = []
    for name in CONTENDERS:
        contender = make("small_convnet", name, 4, plan)
        before = weights(contender)
        assert contender.step() > 0
        assert contender.step() > 0
        changes.append(weights(contender) - before)
    assert plan.measured
    stock, *others = changes
    for change in others:
        assert float((change - stock).norm()) < 0.1 * float(stock.norm())


def weights(contender: Contender) -> torch.Tensor:
    """All parameters as one vector."""
    return torch.cat([one.detach().flatten() for one in contender.model.parameters()])


def test_the_peak_of_memory_can_be_reset() -> None:
    held = torch.ones(60_000_000)
    before = peak_bytes()
    assert before > held.nbytes
    del held
    reset_peak()
    assert peak_bytes() < before - 200_000_000
