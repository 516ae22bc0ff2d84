from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from unisono.errors import UsageError
from unisono.plan.layer_costs import at_rate_of, computing_of, nearest_product, product_seconds, shape_of_product
from unisono.plan.machines import EfficiencyFacts, MachineFacts, NetworkRow, NodeFacts, ProductRow
from unisono.plan.trace import TracedLayer, trace

MACHINE = MachineFacts("example", NodeFacts(flops=1e12), EfficiencyFacts(convolution=0.9, linear=0.6))


def test_the_worked_example() -> None:
    layers = trace(nn.Linear(1000, 1000), torch.empty(8, 1000, requires_grad=True))
    assert [product_seconds(one, one.flops / 8, MACHINE) for one in layers] == [pytest.approx(10e-6)]


def test_convolutions_have_their_own_efficiency() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 16, 5))
    layers = trace(model, torch.empty(4, 3, 6, 6))
    seconds = {one.kind: product_seconds(one, one.flops / 4, MACHINE) for one in layers}
    assert seconds["Conv2d"] == pytest.approx(2 * 2 * 8 * 16 * 27 / 0.9e12)  # no gradient of the images
    assert seconds["BatchNorm2d"] == 0
    assert product_seconds(layers[-1], 6e11, MACHINE) == pytest.approx(1)


def test_a_layer_is_needed_when_it_begins_and_ready_when_its_backward_pass_ends() -> None:
    layers = trace(nn.Sequential(nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 500)), torch.empty(2, 1000))
    first, last = 2e6 / 0.6e12, 1e6 / 0.6e12  # seconds of a pass for a sample
    found = computing_of(layers, MACHINE, 2, 8)
    assert found.needed == pytest.approx((0, 8 * first))
    assert found.ready == pytest.approx((8 * (2 * first + 3 * last), 8 * (first + 3 * last)))
    assert found.whole == pytest.approx(found.ready[0])
    assert computing_of(layers, MACHINE, 2, 2, ranks_per_node=4).whole == pytest.approx(found.whole)


def test_the_nearest_measured_product_of_the_kind_gives_the_rate() -> None:
    (layer,) = trace(nn.Linear(1000, 1000), torch.empty(8, 1000, requires_grad=True))
    (other,) = trace(nn.Conv2d(3, 8, 3), torch.empty(2, 3, 6, 6))
    rows = (
        ProductRow("linear", 8, 1024, 1024, 1, 2e11, 1e11, 0.0),
        ProductRow("linear", 800, 1024, 1024, 1, 8e11, 4e11, 0.0),
    )
    known = replace(MACHINE, products=rows)
    assert product_seconds(layer, 6e11, known, "forward") == pytest.approx(3)
    assert product_seconds(layer, 6e11, known, "backward") == pytest.approx(6)
    assert product_seconds(layer, 6e11, known) == pytest.approx(2e11 / 2e11 + 4e11 / 1e11)
    assert product_seconds(layer, 6e11, known, "forward", scale=90.0) == pytest.approx(6 / 8)
    assert product_seconds(other, 6e11, known) == product_seconds(other, 6e11, MACHINE)
    alone, many = (computing_of([layer], known, 8, samples).whole for samples in (8, 720))
    assert alone == pytest.approx(16e6 / 2e11 + 32e6 / 1e11)
    assert many == pytest.approx(90 * alone / 4)  # more rows of a rank are another product


ROWS = (NetworkRow("net", 16, 50.0), NetworkRow("net", 128, 80.0), NetworkRow("other", 32, 9.0))
LAYERS = trace(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 5)), torch.empty(4, 3, 6, 6))


@pytest.mark.parametrize(("samples", "rate"), [(16, 50), (40, 50), (60, 80), (1000, 80)])
def test_a_network_with_rows_computes_at_the_rate_of_the_nearest_batch(samples: int, rate: float) -> None:
    machine = replace(MACHINE, networks=ROWS, assumed={"node.flops": "a guess", "link.latency": "a guess"})
    for accelerators in (1, 4):
        node = replace(machine.node, accelerators=accelerators)
        found = at_rate_of(replace(machine, node=node), "net", LAYERS, 4, samples * accelerators)
        assert computing_of(LAYERS, found, 4, samples).whole == pytest.approx(samples / rate)
        assert [row.samples_per_second for row in found.networks] == [rate]
        assert found.assumptions == {"link.latency": "a guess"}


def test_a_network_without_rows_has_the_nodes_own_rate() -> None:
    found = at_rate_of(replace(MACHINE, networks=ROWS), "mine", LAYERS, 4, 16)
    assert found == MACHINE
    with pytest.raises(
        UsageError, match=r"example has no node\.flops, and no rate of this network .*: plan net, other on"
    ):
        at_rate_of(replace(MACHINE, node=NodeFacts(), networks=ROWS), "mine", LAYERS, 4, 16)


def row(kind: str, rows: int, inner: int, columns: int, kernel: int = 1) -> ProductRow:
    return ProductRow(kind, rows, inner, columns, kernel, 1e9, 2e9, 0.0)


def traced(layer: nn.Module, *shape: int) -> TracedLayer:
    (found,) = trace(layer, torch.empty(shape))
    return found


def test_the_nearest_product_of_the_worked_example() -> None:
    shape = shape_of_product(traced(nn.Linear(1000, 1000, bias=False), 8, 1000))
    assert shape == ("linear", pytest.approx(8), pytest.approx(1000), pytest.approx(1000), 1)
    rows = [row("linear", 64, 1024, 1024), row("linear", 8, 1024, 1024), row("convolution", 8, 1000, 1000)]
    assert nearest_product(rows, shape) == rows[1]
    assert nearest_product(rows[2:], shape) is None


def test_more_samples_than_were_traced_are_more_rows() -> None:
    layer = traced(nn.Linear(1000, 1000), 2, 1000)
    rows = [row("linear", 8, 1024, 1024), row("linear", 64, 1024, 1024)]
    found = [nearest_product(rows, shape) for scale in (1, 30) if (shape := shape_of_product(layer, scale))]
    assert found == rows


def test_a_convolution_has_its_kernel() -> None:
    layer = traced(nn.Conv2d(64, 128, 3, padding=1, bias=False), 2, 64, 10, 10)
    shape = shape_of_product(layer)
    assert shape is not None
    assert shape[1:] == pytest.approx((200, 64 * 9, 128, 9))
    wide = traced(nn.Conv2d(576, 128, 1, bias=False), 2, 576, 10, 10)
    rows = [row("convolution", 200, 576, 128, 9), row("convolution", 200, 576, 128, 1)]
    assert [nearest_product(rows, one) for one in map(shape_of_product, (layer, wide)) if one] == rows


def test_other_layers_have_no_such_product() -> None:
    assert shape_of_product(traced(nn.ReLU(), 2, 3)) is None
    (attention,) = trace(nn.MultiheadAttention(8, 2), *(torch.empty(2, 3, 8),) * 3)[:1]
    assert shape_of_product(attention) is None
