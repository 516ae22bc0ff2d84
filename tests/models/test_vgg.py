from collections.abc import Callable

import pytest
import torch

from unisono.models.vgg import VGG, vgg16, vgg19, vgg_a


@pytest.mark.parametrize(("make", "layers"), [(vgg_a, 11), (vgg16, 16), (vgg19, 19)])
def test_numbers_of_layers(make: Callable[[int], VGG], layers: int) -> None:
    with torch.device("meta"):
        model = make(1000)
        assert model.features(torch.zeros(2, 3, 224, 224)).shape == (2, 512, 7, 7)
    found = [module for module in model.modules() if isinstance(module, torch.nn.Conv2d | torch.nn.Linear)]
    assert len(found) == layers
    assert all(layer.kernel_size == (3, 3) for layer in found[:-3])


def test_convolutions_keep_the_size() -> None:
    """They begin such that the deepest one neither dies away nor blows up."""
    torch.manual_seed(0)
    model = VGG(10, 3, (2, 2, 4, 4, 4))
    with torch.no_grad():
        found = model.features(torch.randn(2, 3, 64, 64))
    assert 0.01 < float(found.std()) < 100
