import torch

from unisono.models.inception_bn import MODULES, InceptionBN, Module


def test_with_biases_it_is_as_large_as_the_network_of_others() -> None:
    """MXNet's and Caffe's keep a bias beside each norm."""
    with torch.device("meta"):
        model = InceptionBN(1000)
    biases = sum(module.out_channels for module in model.modules() if isinstance(module, torch.nn.Conv2d))
    assert sum(parameter.numel() for parameter in model.parameters()) + biases == 11_295_240


def test_each_module_takes_what_the_one_before_it_gives_and_two_halve_the_size() -> None:
    with torch.device("meta"):
        found, sizes = torch.zeros(1, 192, 28, 28), list[int]()
        for row in MODULES:
            found = Module(*row)(found)
            sizes.append(found.shape[2])
    assert sizes == [28, 28, 14, 14, 14, 14, 14, 7, 7, 7]
    assert found.shape[1] == 1024


def test_what_halves_the_size_passes_its_input_on_beside_the_others() -> None:
    module = Module(*MODULES[2]).eval()
    inputs = torch.rand(1, 320, 6, 6)
    pooled = torch.nn.functional.max_pool2d(inputs, 3, 2, 1)
    assert torch.equal(module(inputs)[:, -320:], pooled)
