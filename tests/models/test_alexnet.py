import torch

from unisono.models.alexnet import AlexNet


def test_parameters_of_each_layer() -> None:
    with torch.device("meta"):
        model = AlexNet(1000)
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Conv2d | torch.nn.Linear)]
    assert [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers] == [
        34_944,
        307_456,
        885_120,
        663_936,
        442_624,
        37_752_832,
        16_781_312,
        4_097_000,
    ]


def test_the_second_convolution_is_in_two_groups() -> None:
    second = AlexNet(10).features[4]
    inputs = torch.rand(1, 96, 27, 27)
    before = second(inputs)
    inputs[:, 48:] = 0
    after = second(inputs)
    assert torch.equal(before[:, :128], after[:, :128])
    assert not torch.equal(before[:, 128:], after[:, 128:])


def test_the_features_are_256_of_6_by_6() -> None:
    with torch.device("meta"):
        assert AlexNet(10).features(torch.zeros(2, 3, 224, 224)).shape == (2, 256, 6, 6)
