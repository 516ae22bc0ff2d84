import torch

from unisono.models.inception_bn import MODULES, InceptionBN, InceptionModule


def test_size_with_biases() -> None:
    """MXNet's and Caffe's networks have a bias in each normalised convolution."""
    with torch.device("meta"):
        model = InceptionBN(1000)
    biases = sum(module.out_channels for module in model.modules() if isinstance(module, torch.nn.Conv2d))
    assert sum(parameter.numel() for parameter in model.parameters()) + biases == 11_295_240


def test_modules_fit_each_other_and_two_halve_the_size() -> None:
    with torch.device("meta"):
        found, sizes = torch.zeros(1, 192, 28, 28), list[int]()
        for row in MODULES:
            found = InceptionModule(*row)(found)
            sizes.append(found.shape[2])
    assert sizes == [28, 28, 14, 14, 14, 14, 14, 7, 7, 7]
    assert found.shape[1] == 1024


def test_a_module_that_halves_the_size_has_a_pool_branch() -> None:
    module = InceptionModule(*MODULES[2]).eval()
    inputs = torch.rand(1, 320, 6, 6)
    pooled = torch.nn.functional.max_pool2d(inputs, 3, 2, 1)
    assert torch.equal(module(inputs)[:, -320:], pooled)
