"""Preparation of a model."""

import os
import platform
import sys

import pytest
import torch
from tests.progress import run
from torch import nn

from unisono.compute.convolution import PlannedConvolution
from unisono.compute.convolution_plan import ConvolutionPlan
from unisono.compute.prepare import autocast_to, choose_dtype, prepare
from unisono.compute.response_norm import ResponseNorm
from unisono.errors import UsageError
from unisono.launch import MALLOC_ENVIRONMENT
from unisono.processor import Processor


def test_layers_change_and_parameters_stay() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.LocalResponseNorm(3), nn.Sequential(nn.Conv2d(4, 4, 1)))
    before = {name: (parameter, parameter.stride()) for name, parameter in model.named_parameters()}
    inputs = torch.randn(2, 3, 6, 6)
    right = model(inputs)
    prepare(model, ConvolutionPlan())
    assert [type(layer) for layer in model[:2]] == [PlannedConvolution, ResponseNorm]
    assert isinstance(model[2][0], PlannedConvolution)
    assert {name: (parameter, parameter.stride()) for name, parameter in model.named_parameters()} == before
    torch.testing.assert_close(model(inputs), right)


PLAIN, AMX = Processor("plain"), Processor("new", bfloat16=True)
FLOAT, BFLOAT16, DOUBLE = torch.float32, torch.bfloat16, torch.float64


@pytest.mark.parametrize(
    ("requested", "weights", "processor", "chosen"),
    [
        ("auto", FLOAT, PLAIN, FLOAT),
        ("auto", FLOAT, AMX, BFLOAT16),
        ("float32", FLOAT, AMX, FLOAT),
        ("bfloat16", FLOAT, PLAIN, BFLOAT16),
        ("bfloat16", DOUBLE, AMX, DOUBLE),
    ],
)
def test_the_dtype_of_products(
    requested: str, weights: torch.dtype, processor: Processor, chosen: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unisono.compute.prepare.processor", lambda: processor)
    assert choose_dtype(requested, weights, torch.device("cpu")) == chosen


@pytest.mark.parametrize(
    ("requested", "supported", "chosen"),
    [("auto", True, BFLOAT16), ("auto", False, FLOAT), ("float32", True, FLOAT), ("bfloat16", True, BFLOAT16)],
)
def test_the_dtype_of_products_on_an_accelerator(
    requested: str, supported: bool, chosen: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unisono.compute.prepare.has_bfloat16", lambda _: supported)
    assert choose_dtype(requested, FLOAT, torch.device("meta")) == chosen


def test_an_accelerator_without_bfloat16_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.compute.prepare.has_bfloat16", lambda _: False)
    with pytest.raises(UsageError, match='meta computes none; take "float32"'):
        choose_dtype("bfloat16", FLOAT, torch.device("meta"))


@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT16])
def test_products_are_computed_in_it(dtype: torch.dtype) -> None:
    layer = torch.nn.Linear(3, 2)
    with autocast_to(dtype, FLOAT, "cpu"):
        outputs = layer(torch.ones(1, 3))
    assert outputs.dtype == dtype
    outputs.float().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == FLOAT


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(UsageError, match="precision 'float8'; there are auto, float32, bfloat16"):
        choose_dtype("float8", FLOAT, torch.device("cpu"))


PROGRAM = """
import torch
from unisono.bench.networks import reset_peak, peak_bytes
from unisono.compute.prepare import release_free_memory

def held():
    reset_peak()
    return peak_bytes()

before = held()
tensors = [torch.ones(1 << 20) for _ in range(64)]
last = torch.ones(1 << 20)
del tensors
kept = held() - before
assert release_free_memory()
print(kept >> 20, (held() - before) >> 20, int(last.sum()) == 1 << 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps memory as it likes")
def test_free_memory_is_released() -> None:
    done = run([sys.executable, "-c", PROGRAM], env={**os.environ, **MALLOC_ENVIRONMENT})
    assert done.returncode == 0, done.stderr
    kept, after, intact = done.stdout.split()
    assert int(kept) >= 250
    assert int(after) < 50
    assert intact == "True"
