"""Times of the passes of a model's layers."""

import io
import json
from functools import partial

import pytest
import torch
from rich.console import Console
from torch import nn

from unisono.bench import layers
from unisono.bench.layers import (
    LayerTiming,
    Peak,
    as_data,
    as_table,
    draw,
    fastest,
    layers_of,
    measure_layers,
    measure_memory,
    measure_peak,
    medians,
    sums,
)
from unisono.compute.convolution import geometry_of
from unisono.compute.convolution_plan import ConvolutionPlan, key_of
from unisono.compute.geometry import Pass
from unisono.errors import UsageError


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, padding=1),
        nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 5),
    )  # fmt: skip


def test_layers_are_found_without_computing() -> None:
    model = network()
    listed = layers_of(model, (2, 3, 6, 6))
    assert [layer.name for layer in listed] == ["0", "1", "2", "3", "4", "5", "7"]
    assert listed[0].module is model[0]
    assert (listed[0].inputs, listed[0].outputs) == ((2, 3, 6, 6), (2, 4, 6, 6))
    assert (listed[-1].inputs, listed[-1].outputs) == ((2, 144), (2, 5))
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


def test_every_algorithm_has_its_time_for_the_whole_batch() -> None:
    """The timed part of a batch gives the ratios, the timed pass the time."""
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1))
    geometry = geometry_of(model[0], torch.zeros(2, 4, 6, 6))
    key, timed = key_of(geometry, Pass.FORWARD), {"library, channels last": 0.2, "unfolded": 0.6}
    plan = ConvolutionPlan({key: timed}, frozen=True)
    row = measure_layers(layers_of(model, (2, 4, 6, 6)), plan, torch.float32, lambda _: None)[0]
    assert row.times == pytest.approx({"library, channels last": row.seconds, "unfolded": 3 * row.seconds})


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


PEAK = Peak(operations_per_second=1e9, bytes_per_second=1e9)
TIMES = {"library, channels last": 0.75, "unfolded": 2.0, "shifted": 1.0, "winograd 4x4, 3x3": 0.5}
ROWS = [
    LayerTiming("first", "Conv2d", "forward", 0.5, 250_000_000, 1000, "winograd 4x4, 3x3", TIMES),
    LayerTiming("first", "Conv2d", "grad_weight", 1.0, 250_000_000, 1000, "library, channels last"),
    LayerTiming("second", "Conv2d", "forward", 0.2, 1000, 150_000_000, "product"),
    LayerTiming("norm", "BatchNorm2d", "forward", 0.1, 0, 50_000_000, ""),
]


def test_a_row_for_each_pass() -> None:
    console = Console(width=180, record=True, file=io.StringIO())
    console.print(as_table(ROWS, PEAK))
    lines = [line.split() for line in console.export_text().splitlines() if line.strip()][2:]
    assert lines[0] == [
        "first",
        "Conv2d",
        "forward",
        "500.00",
        "750.00",
        "0",
        "50%",
        "0.000",
        "50%",
        "winograd",
        "4x4,",
        "3x3",
        *("unfolded", "2000.00;", "shifted", "1000.00"),
    ]
    assert lines[1] == ["grad_weight", "1000.00", "0", "25%", "0.000", "25%", "library,", "channels", "last"]
    assert lines[2][:3] == ["second", "Conv2d", "forward"]
    assert lines[2][-3:] == ["75%", "memory", "product"]
    assert lines[3] == ["norm", "BatchNorm2d", "forward", "100.00", "50%", "memory"]


def test_sums_of_each_kind() -> None:
    assert sums(ROWS) == [
        ("Conv2d, grad_weight", 1.0),
        ("Conv2d, forward", pytest.approx(0.7)),
        ("BatchNorm2d, forward", 0.1),
    ]


def test_medians_are_of_convolutions_alone() -> None:
    assert medians(ROWS, PEAK) == {"forward": pytest.approx(0.625), "grad_weight": pytest.approx(0.25)}


def test_data_names_the_bound() -> None:
    data = json.loads(json.dumps(as_data(ROWS, PEAK, {"model": "small"})))
    assert data["model"] == "small"
    assert [row["bound"] for row in data["rows"]] == ["products", "products", "memory", "memory"]
    assert data["rows"][0]["share_of_bound"] == 0.5


def test_a_bar_chart() -> None:
    pytest.importorskip("matplotlib")
    drawn = draw(ROWS, PEAK, "small").decode()
    for text in (">small<", ">second<", ">grad_weight<", ">bound<", "ms<"):
        assert text in drawn


def test_the_longer_of_both_is_the_bound() -> None:
    peak = Peak(operations_per_second=100.0, bytes_per_second=10.0)
    by_products, by_memory = (
        LayerTiming("a", "Conv2d", "forward", 4.0, operations, least_bytes, "")
        for operations, least_bytes in ((200, 10), (100, 30))
    )
    assert (by_products.share_of_bound(peak), by_products.bound(peak)) == (0.5, "products")
    assert (by_memory.share_of_bound(peak), by_memory.bound(peak)) == (0.75, "memory")


def test_the_first_attempt_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers.timeit, "repeat", lambda *_, repeat, **__: [1.0, 5.0, 3.0, 4.0, 6.0, 7.0][:repeat])
    assert fastest(lambda: None) == 3


def test_a_measured_peak_is_positive(monkeypatch: pytest.MonkeyPatch) -> None:
    small = [(partial(nn.Linear, 16, 16), (32, 16)), (partial(nn.Conv2d, 4, 4, 3, padding=1), (1, 4, 8, 8))]
    monkeypatch.setattr(layers, "PEAK_LAYERS", small)
    monkeypatch.setattr(layers, "COPY_BYTES", 1 << 16)
    peak = measure_peak(torch.bfloat16)
    assert peak.operations_per_second > 0
    assert peak.bytes_per_second > 0


def test_the_best_of_products_is_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [(partial(nn.Linear, 20, 20), (10, 20)), (partial(nn.Linear, 30, 30), (100, 30))]
    seconds = iter([4.0, 10.0, 2.0])
    monkeypatch.setattr(layers, "PEAK_LAYERS", sizes)
    monkeypatch.setattr(layers, "fastest", lambda work: next(seconds))
    monkeypatch.setattr(layers, "COPY_BYTES", 1 << 10)
    peak = measure_peak(torch.float32)
    assert peak.operations_per_second == 2 * 100 * 30 * 30 / 10
    assert peak.bytes_per_second == 2 * 1024 / 2


def test_reads_writes_and_copies_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind has its own rows, by size and by the size of blocks; a copy counts its bytes twice."""
    monkeypatch.setattr(layers, "STRIDED_BYTES", 1 << 20)
    monkeypatch.setattr(layers.timeit, "repeat", lambda work, number, repeat: (work(), [1e-9 * number] * repeat)[1])
    rows = {row["name"]: row["samples"] for row in measure_memory()}
    kinds = {name.partition(" ")[0] for name in rows}
    assert kinds == {"reads", "writes", "copies"}
    places = [name.removeprefix("reads ") for name in rows if name.startswith("reads")]
    assert places[:2] == ["of 4 KiB", "of 16 KiB"]
    assert places[-2:] == ["in blocks of 4 KiB", "in blocks of 16 KiB"]
    assert len(rows) == 3 * len(places) == 3 * (8 + 6)
    assert rows["reads of 4 KiB"] == rows["writes of 4 KiB"] == pytest.approx([4096] * layers.ATTEMPTS)
    assert rows["copies of 4 KiB"] == pytest.approx([2 * 4096] * layers.ATTEMPTS)
    assert rows["copies in blocks of 16 B"] == pytest.approx([2 << 20] * layers.ATTEMPTS)
