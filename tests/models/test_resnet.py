import pytest
import torch

from unisono.models.resnet import BasicBlock, Bottleneck, resnet50, resnet_cifar


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
    outputs = block(inputs)
    assert torch.equal(outputs[:, 1:3], inputs[:, :, ::2, ::2])
    assert not outputs[:, [0, 3]].any()
    same = BasicBlock(2, 2).eval()
    torch.nn.init.zeros_(same.convolution2.weight)
    assert torch.equal(same(inputs), inputs)


def test_size_and_shape_of_resnet50() -> None:
    with torch.device("meta"):
        model = resnet50(1000)
        assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032
        assert model(torch.zeros(2, 3, 224, 224)).shape == (2, 1000)
        features = model.blocks(model.pool(model.first(torch.zeros(2, 3, 224, 224))))
    assert features.shape == (2, 2048, 7, 7)


def test_it_has_50_layers() -> None:
    with torch.device("meta"):
        model = resnet50(10)
    layers = (torch.nn.Conv2d, torch.nn.Linear)
    names = [name for name, module in model.named_modules() if isinstance(module, layers) and "short" not in name]
    assert len(names) == 50
    assert len([name for name, module in model.named_modules() if isinstance(module, layers)]) == 54


def test_a_block_without_its_convolutions_is_its_shortcut() -> None:
    block = Bottleneck(8, 2, 1).eval()
    torch.nn.init.zeros_(block.convolution3.weight)
    inputs = torch.rand(1, 8, 5, 5)
    assert torch.equal(block(inputs), inputs)
    assert Bottleneck(8, 2, 2)(inputs).shape == (1, 8, 3, 3)


def test_a_network_begins_as_its_shortcuts() -> None:
    block = Bottleneck(8, 2, 1)
    inputs = torch.rand(2, 8, 5, 5)
    assert not torch.equal(block(inputs), inputs)
    network = resnet50(3)
    plain = [block for block in network.blocks if isinstance(block.short, torch.nn.Identity)]
    assert len(plain) == 12
    assert float(network.classifier.weight.detach().std()) == pytest.approx(0.01, rel=0.05)
    inputs = torch.rand(2, 2048, 2, 2)
    assert torch.equal(plain[-1](inputs), inputs)
