"""The layer report as a table, as JSON and as a bar chart."""

import io
import json

import pytest
from rich.console import Console

from unisono.bench.layer_report import as_data, as_table, draw, medians, sums
from unisono.bench.layers import LayerTiming
from unisono.bench.peak import Peak

PEAK = Peak(operations_per_second=1e9, bytes_per_second=1e9)
ROWS = [
    LayerTiming("first", "Conv2d", "forward", 0.5, 250_000_000, 1000, "winograd 4x4, 3x3"),
    LayerTiming("first", "Conv2d", "grad_weight", 1.0, 250_000_000, 1000, "library, channels last"),
    LayerTiming("second", "Conv2d", "forward", 0.2, 1000, 150_000_000, "product"),
    LayerTiming("norm", "BatchNorm2d", "forward", 0.1, 0, 50_000_000, ""),
]


def test_a_row_for_each_pass() -> None:
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(as_table(ROWS, PEAK))
    lines = [line.split() for line in console.export_text().splitlines() if line.strip()][2:]
    assert lines[0] == ["first", "Conv2d", "forward", "500.00", "0", "50%", "0.000", "50%", "winograd", "4x4,", "3x3"]
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
    found = json.loads(json.dumps(as_data(ROWS, PEAK, {"model": "small"})))
    assert found["model"] == "small"
    assert [row["bound"] for row in found["rows"]] == ["products", "products", "memory", "memory"]
    assert found["rows"][0]["share_of_bound"] == 0.5


def test_a_bar_chart() -> None:
    pytest.importorskip("matplotlib")
    drawn = draw(ROWS, PEAK, "small").decode()
    for words in (">small<", ">second<", ">grad_weight<", ">bound<", "ms<"):
        assert words in drawn
