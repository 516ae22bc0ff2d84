"""Training steps of networks, by turns."""

import torch

from unisono.bench.networks import CONTENDERS, as_markdown, make, measure_networks, shape_of
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


def test_the_first_step_is_not_counted() -> None:
    found = measure_networks(["small_convnet"], 2, 3, ConvolutionPlan(), lambda line: None)
    assert {name: len(seconds) for name, seconds in found[0]["seconds"].items()} == dict.fromkeys(CONTENDERS, 3)


def test_table() -> None:
    seconds = {"stock": [4.0, 2.0, 3.0], "tuned": [6.0], "ours": [1.5]}
    lines = as_markdown([{"network": "vgg16", "batch": 6, "seconds": seconds}]).splitlines()
    assert lines[2] == "| vgg16 | 6 | 2.00 (1.50-3.00) | 1.00 (1.00-1.00) | 4.00 (4.00-4.00) | 2.00 | 4.00 |"
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|")
