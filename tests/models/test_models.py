from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from unisono.models import MODELS, input_shape, make_network
from unisono.models.convnet import Convnet


class Facts(NamedTuple):
    """Known sizes of a network, from its paper, Theano-MPI's table 2 or the sum of its layers."""

    classes: int
    sample: tuple[int, ...]
    """Shape of a sample; channels are the first number of an image, and the last of windows and texts."""
    parameters: int
    multiply_adds: int
    """Multiply-adds of a forward pass of a sample."""


IMAGE = (3, 224, 224)

FACTS = {
    "small_convnet": Facts(10, (1, 8, 8), 159_626, 2_444_544),
    "resnet8": Facts(10, (3, 32, 32), 75_290, 12_239_488),
    "resnet20": Facts(10, (3, 32, 32), 269_722, 40_551_040),
    "resnet32": Facts(10, (3, 32, 32), 464_154, 68_862_592),
    "resnet44": Facts(10, (3, 32, 32), 658_586, 97_174_144),
    "resnet50_cifar": Facts(10, (3, 32, 32), 755_802, 111_329_920),
    "resnet56": Facts(10, (3, 32, 32), 853_018, 125_485_696),
    "resnet110": Facts(10, (3, 32, 32), 1_727_962, 252_887_680),
    "resnet50": Facts(1000, IMAGE, 25_557_032, 4_089_184_256),
    "alexnet": Facts(1000, IMAGE, 60_965_224, 724_406_816),
    "alexnet_bn": Facts(1000, IMAGE, 60_974_792, 724_406_816),
    "overfeat_fast": Facts(1000, (3, 231, 231), 145_920_872, 2_801_403_904),
    "vgg_a": Facts(1000, IMAGE, 132_863_336, 7_609_090_048),
    "vgg16": Facts(1000, IMAGE, 138_357_544, 15_470_264_320),
    "vgg19": Facts(1000, IMAGE, 143_667_240, 19_632_062_464),
    "googlenet": Facts(1000, IMAGE, 13_378_280, 1_582_671_872),
    "googlenet_bn": Facts(1000, IMAGE, 7_005_832, 1_582_671_872),
    "googlenet_bn_torch": Facts(1000, IMAGE, 19_147_888, 2_760_854_528),
    "inception_bn": Facts(1000, IMAGE, 11_285_224, 2_032_600_064),
    "cd_dnn": Facts(10, (440,), 26_101_770, 26_087_424),
    "gpt_small": Facts(256, (128,), 875_264, 121_634_816),
}


TEXT = ("gpt_small",)
"""Networks whose inputs are tokens, and whose scores are those of each token."""


def blank(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64 if name in TEXT else torch.float32)


def channels_of(name: str) -> int:
    sample = FACTS[name].sample
    return sample[0] if len(sample) == 3 else sample[-1]


def test_every_network_has_a_name() -> None:
    assert set(FACTS) == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_numbers_of_parameters_and_multiply_adds(name: str) -> None:
    facts, counter = FACTS[name], FlopCounterMode(display=False)
    with torch.device("meta"), torch.no_grad():
        model = MODELS.load(name)(facts.classes, channels_of(name)).eval()
        with counter:
            scores = model(blank(name, (1, *facts.sample)))
    assert scores.shape == (*((1, *facts.sample) if name in TEXT else (1,)), facts.classes)
    assert sum(parameter.numel() for parameter in model.parameters()) == facts.parameters
    assert counter.get_total_flops() == 2 * facts.multiply_adds


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("samples", [2, 1])
def test_any_number_of_channels_and_a_gradient_for_every_weight(name: str, samples: int) -> None:
    sample = FACTS[name].sample
    channels = channels_of(name) + 2 - samples  # as many as usual, and one more
    windows = (samples, channels) if name in TEXT else (samples, 3, channels)
    shape = (samples, channels, *sample[1:]) if len(sample) == 3 else windows
    with torch.device("meta"):
        model = MODELS.load(name)(7, channels)
        scores = model(blank(name, shape))
    several = scores if isinstance(scores, tuple) else (scores,)
    expected = (*shape, 7) if name in TEXT else (samples, 7)
    assert [each.shape for each in several] == [expected] * len(several)
    sum(each.sum() for each in several).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_name_is_of_the_registry_or_user_defined(tmp_path: Path) -> None:
    (tmp_path / "table_nets.py").write_text("import torch\ndef flat(*sizes): return torch.nn.Bilinear(*sizes, 1)\n")
    assert isinstance(make_network("small_convnet", "", 10, 1), Convnet)
    own = make_network("table_nets:flat", str(tmp_path), 10, 3)
    assert (own.in1_features, own.in2_features) == (10, 3)


def test_shapes_of_samples() -> None:
    assert input_shape("vgg16") == (3, 224, 224)
    assert input_shape("overfeat_fast") == (3, 231, 231)
    assert input_shape("resnet50", 64) == (3, 64, 64)
    assert input_shape("cd_dnn", 64) == (440,)
