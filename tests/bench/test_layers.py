"""Times of the passes of a model's layers."""

import pytest
import torch
from torch import nn

from unisono.bench.layers import LayerTiming, layers_of, measure_layers
from unisono.bench.peak import Peak
from unisono.compute.convolution_plan import ConvolutionPlan
from unisono.compute.geometry import Pass
from unisono.errors import UsageError


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, padding=1),
        nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 5),
    )  # fmt: skip


def test_layers_are_found_without_computing() -> None:
    model = network()
    found = layers_of(model, (2, 3, 6, 6))
    assert [layer.name for layer in found] == ["0", "1", "2", "3", "4", "5", "7"]
    assert found[0].module is model[0]
    assert (found[0].inputs, found[0].outputs) == ((2, 3, 6, 6), (2, 4, 6, 6))
    assert (found[-1].inputs, found[-1].outputs) == ((2, 144), (2, 5))
    assert next(model.parameters()).device.type == "cpu"


def test_inputs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match=r"does not accept inputs of shape \(2, 3, 7, 7\)"):
        layers_of(network(), (2, 3, 7, 7))


def test_layers_that_a_plan_cannot_compute() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding="same"), nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
        nn.ConvTranspose2d(4, 4, 3), nn.Softmax(1),
    )  # fmt: skip
    rows = measure_layers(layers_of(model, (2, 3, 6, 6)), ConvolutionPlan(), torch.bfloat16, lambda _: None)
    assert {(row.layer, row.kind) for row in rows} == {
        ("0", "Conv2d"), ("1", "Conv2d"), ("2", "ConvTranspose2d"), ("3", "Softmax"),
    }  # fmt: skip
    assert all(row.algorithm == "" for row in rows)


def test_a_layer_that_cannot_be_computed_in_the_dtype_is_named() -> None:
    class Refusing(nn.Module):
        """Layer that refuses bfloat16."""

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if inputs.dtype == torch.bfloat16:
                raise RuntimeError("not of 16 bits")
            return inputs

    model = nn.Sequential(nn.Conv2d(3, 4, 3), Refusing())
    message = r"layer 1, Refusing\(\), cannot be computed in torch.bfloat16: not of 16 bits; try --precision float32"
    with pytest.raises(UsageError, match=message):
        measure_layers(layers_of(model, (2, 3, 6, 6)), ConvolutionPlan(), torch.bfloat16, lambda _: None)


def test_each_pass_has_a_row() -> None:
    logged: list[str] = []
    rows = measure_layers(layers_of(network(), (2, 3, 6, 6)), ConvolutionPlan(), torch.float32, logged.append)
    by = {(row.layer, row.pass_name): row for row in rows}
    assert ("0", Pass.GRAD_INPUT.value) not in by  # the images need no gradient
    assert {which for layer, which in by if layer == "3"} == {which.value for which in Pass}
    assert {which for layer, which in by if layer == "1"} == {Pass.FORWARD.value, Pass.GRAD_INPUT.value}
    assert by["3", Pass.GRAD_WEIGHT.value].operations == 2 * 2 * 36 * 4 * 4 * 9
    assert by["3", Pass.GRAD_WEIGHT.value].algorithm == "library, channels last"
    assert by["7", Pass.GRAD_INPUT.value].operations == 2 * 2 * 144 * 5
    assert by["7", Pass.GRAD_INPUT.value].least_bytes == 4 * (2 * 144 + 2 * 5 + 144 * 5)
    assert by["2", Pass.FORWARD.value].operations == 0
    assert all(row.seconds > 0 for row in rows)


def test_equal_layers_are_measured_once() -> None:
    model = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4)))
    logged: list[str] = []
    rows = measure_layers(layers_of(model, (1, 4, 6, 6)), ConvolutionPlan(), torch.float32, logged.append)
    assert logged == ["1/4 0", "2/4 1"]
    assert len({row.seconds for row in rows if row.pass_name == Pass.FORWARD.value and row.layer != "0"}) == 1
    assert [row.layer for row in rows if row.pass_name == Pass.GRAD_INPUT.value] == ["1", "2", "3"]


def test_share_of_the_bound() -> None:
    peak = Peak(operations_per_second=100.0, bytes_per_second=10.0)
    assert LayerTiming("a", "Conv2d", "forward", 4.0, 200, 10, "").share_of_bound(peak) == 0.5
    assert LayerTiming("a", "ReLU", "forward", 4.0, 0, 10, "").share_of_bound(peak) == 0.25
