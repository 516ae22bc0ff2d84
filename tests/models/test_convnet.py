from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import cross_entropy

from unisono.models.convnet import (
    CDDNN,
    Convnet,
    _Norm,
    alexnet,
    alexnet_bn,
    overfeat_fast,
    small_convnet,
    vgg,
    vgg16,
    vgg19,
    vgg_a,
)


def test_parameters_of_each_layer() -> None:
    with torch.device("meta"):
        model = alexnet(1000)
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
    second = alexnet(10).features[4]
    inputs = torch.rand(1, 96, 27, 27)
    before = second(inputs)
    inputs[:, 48:] = 0
    after = second(inputs)
    assert torch.equal(before[:, :128], after[:, :128])
    assert not torch.equal(before[:, 128:], after[:, 128:])


def test_the_features_are_256_of_6_by_6() -> None:
    with torch.device("meta"):
        assert alexnet(10).features(torch.zeros(2, 3, 224, 224)).shape == (2, 256, 6, 6)


CONVOLUTIONS = 96 * 3 * 11**2 + 256 * 48 * 5**2 + (384 * 256 + 384 * 192 + 256 * 192) * 3**2
NORMS = 2 * (96 + 256 + 384 + 384 + 256 + 4096 + 4096)
WIDE = 256 * 6 * 6 * 4096 + 4096 * 4096


def test_size_and_shape_with_norms() -> None:
    with torch.device("meta"):
        model = alexnet_bn(1000)
        size = sum(parameter.numel() for parameter in model.parameters())
        assert size == CONVOLUTIONS + NORMS + WIDE + 4096 * 1000 + 1000 == 60_974_792
        assert model(torch.zeros(2, 3, 224, 224)).shape == (2, 1000)


def test_it_is_alexnet_with_norms_in_place_of_biases() -> None:
    with torch.device("meta"):
        model = alexnet_bn(1000)
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


@pytest.mark.parametrize(("make", "layers"), [(vgg_a, 11), (vgg16, 16), (vgg19, 19)])
def test_numbers_of_layers(make: Callable[[int], Convnet], layers: int) -> None:
    with torch.device("meta"):
        model = make(1000)
        assert model.features(torch.zeros(2, 3, 224, 224)).shape == (2, 512, 7, 7)
    weighted = [module for module in model.modules() if isinstance(module, torch.nn.Conv2d | torch.nn.Linear)]
    assert len(weighted) == layers
    assert all(layer.kernel_size == (3, 3) for layer in weighted[:-3])


def test_convolutions_keep_the_size() -> None:
    """They begin such that the deepest one neither dies away nor blows up."""
    torch.manual_seed(0)
    model = vgg(10, depths=(2, 2, 4, 4, 4))
    with torch.no_grad():
        outputs = model.features(torch.randn(2, 3, 64, 64))
    assert 0.01 < float(outputs.std()) < 100


def test_the_size_after_each_layer() -> None:
    """As the paper's table has them, and PCL-DNN: convolutions from 512 to 1,024 channels at 12 x 12."""
    with torch.device("meta"):
        model, outputs = overfeat_fast(1000), torch.zeros(1, 3, 231, 231)
        sizes = [(3, 231)]
        for layer in model.features:
            outputs = layer(outputs)
            if (outputs.shape[1], outputs.shape[2]) != sizes[-1]:
                sizes.append((outputs.shape[1], outputs.shape[2]))
    assert sizes == [(3, 231), (96, 56), (96, 28), (256, 24), (256, 12), (512, 12), (1024, 12), (1024, 6)]


def test_size_and_shape_of_the_small_one() -> None:
    model = small_convnet(10)
    assert sum(parameter.numel() for parameter in model.parameters()) == 159_626
    assert model(torch.zeros(3, 1, 8, 8)).shape == (3, 10)


def test_seven_hidden_layers() -> None:
    with torch.device("meta"):
        layers = [module for module in CDDNN(10).modules() if isinstance(module, torch.nn.Linear)]
    assert [layer.out_features for layer in layers] == [2048] * 7 + [10]


def test_a_recording_is_the_mean_of_its_windows_posteriors_in_logarithms() -> None:
    torch.manual_seed(0)
    model, windows = CDDNN(3, 5), torch.randn(2, 4, 5)
    with torch.no_grad():
        outputs = model(windows)
        expected = torch.zeros(2, 3)
        for sample in range(2):
            for window in range(4):
                (scores,) = model.layers(windows[sample, window][None])
                expected[sample] += torch.log(torch.exp(scores) / torch.exp(scores).sum()) / 4
    torch.testing.assert_close(outputs, expected)
    assert (expected[0] - expected[1]).abs().max() > 1e-3, "recordings that all look alike agree with anything"


def test_a_single_window_needs_no_windows_dimension() -> None:
    torch.manual_seed(0)
    model, windows = CDDNN(3, 5), torch.randn(2, 5)
    with torch.no_grad():
        torch.testing.assert_close(model(windows), model(windows[:, None]))
        torch.testing.assert_close(model(windows).exp().sum(dim=1), torch.ones(2))
        labels = torch.tensor([0, 2])
        torch.testing.assert_close(cross_entropy(model(windows), labels), cross_entropy(model.layers(windows), labels))
