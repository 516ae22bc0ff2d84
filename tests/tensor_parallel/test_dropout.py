"""Masks follow from seed, step, sample and layer alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from unisono.errors import UsageError
from unisono.tensor_parallel.layers import SampleDropout, use_sample_dropout
from unisono.tensor_parallel.layouts import SampleNumbers


def dropouts(seed: SampleNumbers) -> nn.Sequential:
    model = nn.Sequential(nn.Dropout(0.3), nn.Dropout(0.3), nn.Dropout(0.0))
    use_sample_dropout(model, seed)
    return model


def test_a_sample_has_the_same_mask_on_any_rank() -> None:
    seed, ones = SampleNumbers(7, 3), torch.ones(12, 50)
    model = dropouts(seed)
    seed.first = 0
    full = model[0](ones)
    for share, samples in ((0, 6), (1, 6), (3, 3)):
        seed.first = None
        seed.rank = share
        assert torch.equal(model[0](ones[:samples]), full[share * samples : (share + 1) * samples])
    assert torch.equal(copy.deepcopy(model)[0](ones[:3]), full[9:12])


def test_other_seeds_steps_and_layers_have_other_masks() -> None:
    seed, ones = SampleNumbers(7, 3, first=0), torch.ones(4, 100)
    model = dropouts(seed)
    masks = [model[0](ones), model[1](ones)]
    for seed.seed, seed.step in ((8, 3), (7, 4)):
        masks.append(model[0](ones))
    assert all(not torch.equal(mask, other) for at, mask in enumerate(masks) for other in masks[:at])
    assert torch.equal(model[2](ones), ones)
    assert torch.equal(model.eval()[0](ones), ones)


def test_the_share_of_zeros_and_the_mean_are_those_of_a_dropout() -> None:
    model = dropouts(SampleNumbers(1, 1, first=0))
    outputs = model[0](torch.ones(100, 1000))
    assert set(outputs.unique().tolist()) == {0.0, float(torch.tensor(1 / 0.7))}
    assert abs(float((outputs == 0).float().mean()) - 0.3) < 0.01
    inputs = torch.ones(3, 5, requires_grad=True)
    model[1](inputs).sum().backward()
    assert torch.equal(inputs.grad, model[1](torch.ones(3, 5)))
    assert len(model[0](torch.ones(0, 4))) == 0
    assert torch.equal(SampleDropout.forward(set_p(model[0], 1.0), torch.ones(2, 2)), torch.zeros(2, 2))


def test_a_dropout_in_place_changes_its_input() -> None:
    """Also where its output is not used."""
    model = nn.Sequential(nn.Dropout(0.3, inplace=True))
    own, leaf = torch.ones(4, 50), torch.ones(4, 50, requires_grad=True)
    use_sample_dropout(model, SampleNumbers(7, 3, first=0))
    hidden = leaf * 1.0
    assert model[0](own) is own
    model[0](hidden)
    hidden.sum().backward()
    assert (own == 0).any()
    assert torch.equal(hidden, own)
    assert torch.equal(leaf.grad, own)
    version = hidden._version
    assert model.eval()[0](hidden)._version == version


def test_outside_of_a_pass_of_the_model_the_program_says_the_step() -> None:
    """All steps would have one mask."""
    model = dropouts(numbers := SampleNumbers(first=0))
    model[0](torch.ones(2, 3))
    with pytest.raises(UsageError, match="count calls of the model in training mode: else call seed_dropout each step"):
        model[0](torch.ones(2, 3))
    numbers.counts = False
    assert model[0](torch.ones(2, 3)).shape == (2, 3)


def test_a_mask_is_the_same_on_a_device(device: torch.device) -> None:
    model, ones = dropouts(SampleNumbers(7, 3, first=0)), torch.ones(4, 50)
    assert torch.equal(model[0](ones.to(device)).cpu(), model[0](ones))


def set_p(layer: nn.Module, p: float) -> nn.Module:
    layer.p = p
    return layer
