from __future__ import annotations

import torch
from torch import nn

from unisono.reducer.model_comparison import describe, difference, digest


def test_models_that_are_alike_have_one_description() -> None:
    assert describe(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))) == describe(
        nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    )


def test_the_first_difference_is_reported_with_both_values() -> None:
    plain, wide, none = (describe(one) for one in (nn.Linear(2, 3), nn.Linear(2, 4), nn.Sequential()))
    half, frozen = describe(nn.Linear(2, 3).half()), describe(nn.Linear(2, 3).requires_grad_(False))
    assert (
        "rank 0 has parameter weight, (3, 2) of float32, rank 2 has parameter weight, (4, 2) of float32"
        in difference([plain, plain, wide])
    )
    assert "rank 1 has no more" in difference([plain, none])
    assert "rank 0 has no more" in difference([none, plain])
    assert "rank 1 has parameter weight, (3, 2) of float16" in difference([plain, half])
    assert "rank 1 has parameter weight, (3, 2) of float32, frozen" in difference([plain, frozen])


def test_tied_parameters_differ_from_two() -> None:
    two = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    tied[1].weight = tied[0].weight
    assert "the same as parameter 0.weight" in difference([describe(two), describe(tied)])


def test_buffers_count() -> None:
    module = nn.Module()
    module.register_buffer("mean", torch.zeros(2))
    assert describe(module) == [("buffer mean", "(2,) of float32")]


def test_a_digest_is_that_of_all_bits() -> None:
    weights = [torch.zeros(()), torch.arange(6.0).bfloat16().view(2, 3).t(), torch.ones(2, dtype=torch.complex64)]
    assert digest(weights) == digest([one.clone() for one in weights]) < 2**52
    for number in range(len(weights)):
        others = [one.clone() for one in weights]
        others[number][(0,) * others[number].dim()] = 5
        assert digest(others) != digest(weights)
