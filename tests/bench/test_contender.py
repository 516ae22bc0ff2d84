"""One way of making steps."""

import torch

from unisono.bench.contender import CONTENDERS, forget_peak, make, peak_bytes, shape_of
from unisono.compute.convolution_plan import ConvolutionPlan


def test_shapes() -> None:
    assert shape_of("vgg16", 4) == (4, 3, 224, 224)
    assert shape_of("overfeat_fast", 4) == (4, 3, 231, 231)
    assert shape_of("resnet50", 4, 64) == (4, 3, 64, 64)
    assert shape_of("cd_dnn", 4, 64) == (4, 440)


def test_all_make_the_same_steps() -> None:
    plan = ConvolutionPlan()
    contenders = [make("small_convnet", name, 4, plan) for name in CONTENDERS]
    for contender in contenders:
        assert contender.step() > 0
        assert contender.step() > 0
    stock, tuned, ours = (torch.cat([one.flatten() for one in c.model.parameters()]) for c in contenders)
    torch.testing.assert_close(ours, stock, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(tuned, stock, rtol=1e-2, atol=1e-3)


def test_the_peak_of_memory_counts_anew() -> None:
    held = torch.ones(60_000_000)
    before = peak_bytes()
    assert before > held.nbytes
    del held
    forget_peak()
    assert peak_bytes() < before - 200_000_000
