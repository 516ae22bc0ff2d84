import torch

from unisono.models.overfeat_fast import OverFeatFast


def test_the_size_after_each_layer() -> None:
    """As the paper's table has them, and PCL-DNN: convolutions from 512 to 1,024 channels at 12 x 12."""
    with torch.device("meta"):
        model, found = OverFeatFast(1000), torch.zeros(1, 3, 231, 231)
        sizes = [(3, 231)]
        for layer in model.features:
            found = layer(found)
            if (found.shape[1], found.shape[2]) != sizes[-1]:
                sizes.append((found.shape[1], found.shape[2]))
    assert sizes == [(3, 231), (96, 56), (96, 28), (256, 24), (256, 12), (512, 12), (1024, 12), (1024, 6)]
