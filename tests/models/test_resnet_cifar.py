import torch

from unisono.models.resnet_cifar import BasicBlock, resnet_cifar


def test_size_and_shape() -> None:
    model = resnet_cifar(20, 10)
    assert sum(parameter.numel() for parameter in model.parameters()) == 269_722
    assert model(torch.zeros(3, 3, 32, 32)).shape == (3, 10)
    assert resnet_cifar(20, 10, 1)(torch.zeros(3, 1, 28, 28)).shape == (3, 10)


def test_it_has_6_n_layers_and_2() -> None:
    for count in (8, 20):
        layers = [module for module in resnet_cifar(count, 10).modules() if hasattr(module, "weight")]
        assert len([layer for layer in layers if not isinstance(layer, torch.nn.BatchNorm2d)]) == count


def test_the_shortcut_is_strided_and_padded_with_zeros() -> None:
    block = BasicBlock(2, 4).eval()
    torch.nn.init.zeros_(block.convolution2.weight)
    inputs = torch.rand(1, 2, 7, 7)
    found = block(inputs)
    assert torch.equal(found[:, 1:3], inputs[:, :, ::2, ::2])
    assert not found[:, [0, 3]].any()
    same = BasicBlock(2, 2).eval()
    torch.nn.init.zeros_(same.convolution2.weight)
    assert torch.equal(same(inputs), inputs)
