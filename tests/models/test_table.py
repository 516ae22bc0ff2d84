import pytest
import torch

from unisono.models.catalogue import NETWORKS
from unisono.models.table import MODELS

SIZES = {"small_convnet": 8, "resnet20": 32, "alexnet_bn": 224, "resnet50": 224}
"""Pixels across that each is made for."""


def test_every_network_is_in_the_catalogue() -> None:
    assert tuple(MODELS) == NETWORKS


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(("samples", "colors"), [(2, 3), (1, 1)])
def test_every_network_makes_scores_of_pictures_and_every_weight_of_it_learns(
    name: str, samples: int, colors: int
) -> None:
    with torch.device("meta"):
        model = MODELS[name](7, colors)
        scores = model(torch.zeros(samples, colors, SIZES[name], SIZES[name]))
    assert scores.shape == (samples, 7)
    scores.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
