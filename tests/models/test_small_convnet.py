import torch

from unisono.models.small_convnet import SmallConvnet


def test_size_and_shape() -> None:
    model = SmallConvnet(10)
    assert sum(parameter.numel() for parameter in model.parameters()) == 159_626
    assert model(torch.zeros(3, 1, 8, 8)).shape == (3, 10)
