import torch

from unisono.models.alexnet import AlexNet, AlexNetBN, _Norm


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


CONVOLUTIONS = 96 * 3 * 11**2 + 256 * 48 * 5**2 + (384 * 256 + 384 * 192 + 256 * 192) * 3**2
NORMS = 2 * (96 + 256 + 384 + 384 + 256 + 4096 + 4096)
WIDE = 256 * 6 * 6 * 4096 + 4096 * 4096


def test_size_and_shape() -> None:
    with torch.device("meta"):
        model = AlexNetBN(1000)
        size = sum(parameter.numel() for parameter in model.parameters())
        assert size == CONVOLUTIONS + NORMS + WIDE + 4096 * 1000 + 1000 == 60_974_792
        assert model(torch.zeros(2, 3, 224, 224)).shape == (2, 1000)


def test_it_is_alexnet_with_norms_in_place_of_biases() -> None:
    with torch.device("meta"):
        model = AlexNetBN(1000)
    biases = 96 + 256 + 384 + 384 + 256 + 4096 + 4096
    size = sum(parameter.numel() for parameter in model.parameters())
    assert size - NORMS + biases == 60_965_224, "AlexNet's"


def test_a_single_sample_uses_running_statistics() -> None:
    norm = _Norm(3)
    norm(torch.rand(8, 3))
    mean, variance = norm.running_mean.clone(), norm.running_var.clone()
    sample = torch.rand(1, 3)
    torch.testing.assert_close(norm(sample), (sample - mean) / (variance + norm.eps).sqrt())
    assert torch.equal(norm.running_mean, mean)
    assert torch.equal(norm.running_var, variance)
