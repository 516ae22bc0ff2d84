"""Computing, loading and memory of a planned run: the worked examples, and what is not known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from unisono.data.order import share
from unisono.errors import UsageError
from unisono.plan.loading import SampleFacts
from unisono.plan.machines import (
    DecodingFacts,
    EfficiencyFacts,
    MachineFacts,
    NetworkRow,
    NodeFacts,
    ProductRow,
)
from unisono.plan.planned_run import (
    PlannedRun,
    RankMemory,
    at_rate_of,
    computing_of,
    nearest_product,
    numbers_kept,
    product_seconds,
    rank_memory,
    shape_of_product,
)
from unisono.plan.trace import TracedLayer, trace
from unisono.rules import BSP, DiLoCo, Exchange, LocalSGD, Sharded

LAYERS = [
    TracedLayer("0", "Linear", parameter_bytes=100, gradient_bytes=100, activation_bytes=60),
    TracedLayer("1", "ReLU", activation_bytes=40),
]
RUN = PlannedRun(MachineFacts("example"), LAYERS, 2, BSP(), 32, 4, kept=2.0)


@pytest.mark.parametrize(
    ("virtual", "nodes", "ranks_per_node"), [(0, 8, 1), (9, 8, 1), (12, 4, 2), (3, 2, 1), (5, 2, 2), (16, 3, 3)]
)
def test_the_slowest_rank_has_the_largest_share(virtual: int, nodes: int, ranks_per_node: int) -> None:
    batch = 12 * (virtual or 7)
    machine = MachineFacts("example", NodeFacts(cores=1), decoding=DecodingFacts(1.0))
    run = replace(RUN, minibatch=batch, nodes=nodes, ranks_per_node=ranks_per_node, virtual_ranks=virtual)
    shares = [len(share(np.arange(batch), batch, 0, rank, run.ranks, virtual)) for rank in range(run.ranks)]
    assert run.samples_of_rank == max(shares)
    loading = replace(run, machine=machine, samples=SampleFacts(pixels=1.0)).loading
    most = max(sum(shares[first : first + ranks_per_node]) for first in range(0, run.ranks, ranks_per_node))
    assert loading.decoding == pytest.approx(most)


def test_the_worked_example_of_memory() -> None:
    memory = rank_memory(RUN)
    assert memory == RankMemory(100, 100, 200, 0, 400)
    assert memory.total == 800
    assert rank_memory(replace(RUN, rule=Sharded())).total == 650


def test_frozen_parameters_have_neither_gradients_nor_state() -> None:
    frozen = replace(RUN, layers=[*LAYERS, TracedLayer("2", "Linear", parameter_bytes=50)])
    assert rank_memory(frozen) == rank_memory(RUN)._replace(weights=150)


def test_an_anchor_is_as_large_as_the_weights() -> None:
    assert rank_memory(replace(RUN, rule=LocalSGD(Exchange(wire="int4")))).anchor == 100
    assert rank_memory(replace(RUN, rule=LocalSGD())).anchor == 0


def test_an_outer_optimizer_has_a_momentum_and_a_wire_of_changes_what_it_rounded_away() -> None:
    wire = Exchange(wire="int4")
    assert rank_memory(replace(RUN, rule=DiLoCo())).outer == 100
    assert rank_memory(replace(RUN, rule=DiLoCo(outer_momentum=0.0))).outer == 0
    assert rank_memory(replace(RUN, rule=DiLoCo(wire))).outer == 100 + 125
    assert rank_memory(replace(RUN, rule=LocalSGD(wire))).outer == 125
    assert rank_memory(replace(RUN, rule=LocalSGD(Exchange(wire="exact")))).outer == 0


def test_ranks_that_differ_gather_their_states_for_a_checkpoint() -> None:
    local, outer = (rank_memory(replace(RUN, rule=rule)) for rule in (LocalSGD(), DiLoCo()))
    assert (local.gathered, outer.gathered) == (4 * 300, 4 * 500)
    assert (local.total, outer.total) == (400 + 1200, 600 + 2000)
    assert rank_memory(replace(RUN, rule=LocalSGD(), minibatch=1280)).total == 400 + 16_000
    assert rank_memory(RUN).gathered == rank_memory(replace(RUN, rule=Sharded())).gathered == 0


def test_an_optimizer_keeps_what_its_step_leaves() -> None:
    kept = {name: numbers_kept(name, 0.9) for name in ("sgd", "adamw", "lars", "lamb")}
    assert kept == {"sgd": 1, "adamw": 2, "lars": 1, "lamb": 2}
    assert numbers_kept("sgd", 0.0) == 0
    with pytest.raises(UsageError, match="there is no optimizer 'adagrad'"):
        numbers_kept("adagrad", 0.9)


COMPUTER = MachineFacts("example", NodeFacts(flops=1e12), EfficiencyFacts(convolution=0.9, linear=0.6))


def test_the_worked_example_of_computing() -> None:
    layers = trace(nn.Linear(1000, 1000), torch.empty(8, 1000, requires_grad=True)).layers
    assert [product_seconds(layer, layer.flops / 8, COMPUTER) for layer in layers] == [pytest.approx(10e-6)]


def test_convolutions_have_their_own_efficiency() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 16, 5))
    layers = trace(model, torch.empty(4, 3, 6, 6)).layers
    seconds = {layer.kind: product_seconds(layer, layer.flops / 4, COMPUTER) for layer in layers}
    assert seconds["Conv2d"] == pytest.approx(2 * 2 * 8 * 16 * 27 / 0.9e12)  # no gradient of the images
    assert seconds["BatchNorm2d"] == 0
    assert product_seconds(layers[-1], 6e11, COMPUTER) == pytest.approx(1)


def test_a_layer_is_needed_when_it_begins_and_ready_when_its_backward_pass_ends() -> None:
    layers = trace(nn.Sequential(nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 500)), torch.empty(2, 1000)).layers
    first, last = 2e6 / 0.6e12, 1e6 / 0.6e12  # seconds of a pass for a sample
    computing = computing_of(layers, COMPUTER, 2, 8)
    assert computing.needed == pytest.approx((0, 8 * first))
    assert computing.ready == pytest.approx((8 * (2 * first + 3 * last), 8 * (first + 3 * last)))
    assert computing.whole == pytest.approx(computing.ready[0])
    assert computing_of(layers, COMPUTER, 2, 2, ranks_per_node=4).whole == pytest.approx(computing.whole)


def test_the_nearest_measured_product_of_the_kind_gives_the_rate() -> None:
    (layer,) = trace(nn.Linear(1000, 1000), torch.empty(8, 1000, requires_grad=True)).layers
    (other,) = trace(nn.Conv2d(3, 8, 3), torch.empty(2, 3, 6, 6)).layers
    rows = (
        ProductRow("linear", 8, 1024, 1024, 1, 2e11, 1e11, 0.0),
        ProductRow("linear", 800, 1024, 1024, 1, 8e11, 4e11, 0.0),
    )
    known = replace(COMPUTER, products=rows)
    assert product_seconds(layer, 6e11, known, "forward") == pytest.approx(3)
    assert product_seconds(layer, 6e11, known, "backward") == pytest.approx(6)
    assert product_seconds(layer, 6e11, known) == pytest.approx(2e11 / 2e11 + 4e11 / 1e11)
    assert product_seconds(layer, 6e11, known, "forward", scale=90.0) == pytest.approx(6 / 8)
    assert product_seconds(other, 6e11, known) == product_seconds(other, 6e11, COMPUTER)
    alone, many = (computing_of([layer], known, 8, samples).whole for samples in (8, 720))
    assert alone == pytest.approx(16e6 / 2e11 + 32e6 / 1e11)
    assert many == pytest.approx(90 * alone / 4)  # more rows of a rank are another product


ROWS = (NetworkRow("net", 16, 50.0), NetworkRow("net", 128, 80.0), NetworkRow("other", 32, 9.0))
CONVOLVED = trace(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 5)), torch.empty(4, 3, 6, 6)).layers


@pytest.mark.parametrize(("samples", "rate"), [(16, 50), (40, 50), (60, 80), (1000, 80)])
def test_a_network_with_rows_computes_at_the_rate_of_the_nearest_batch(samples: int, rate: float) -> None:
    machine = replace(COMPUTER, networks=ROWS, assumed={"node.flops": "a guess", "link.latency": "a guess"})
    for accelerators in (1, 4):
        node = replace(machine.node, accelerators=accelerators)
        rated = at_rate_of(replace(machine, node=node), "net", CONVOLVED, 4, samples * accelerators)
        assert computing_of(CONVOLVED, rated, 4, samples).whole == pytest.approx(samples / rate)
        assert [row.samples_per_second for row in rated.networks] == [rate]
        assert rated.assumptions == {"link.latency": "a guess"}


def test_a_network_without_rows_has_the_nodes_own_rate() -> None:
    rated = at_rate_of(replace(COMPUTER, networks=ROWS), "mine", CONVOLVED, 4, 16)
    assert rated == COMPUTER
    with pytest.raises(
        UsageError, match=r"example has no node\.flops, and no rate of this network .*: plan net, other on"
    ):
        at_rate_of(replace(COMPUTER, node=NodeFacts(), networks=ROWS), "mine", CONVOLVED, 4, 16)


def row(kind: str, rows: int, inner: int, columns: int, kernel: int = 1) -> ProductRow:
    return ProductRow(kind, rows, inner, columns, kernel, 1e9, 2e9, 0.0)


def traced(layer: nn.Module, *shape: int) -> TracedLayer:
    (traced_layer,) = trace(layer, torch.empty(shape)).layers
    return traced_layer


def test_the_nearest_product_of_the_worked_example() -> None:
    shape = shape_of_product(traced(nn.Linear(1000, 1000, bias=False), 8, 1000))
    assert shape == ("linear", pytest.approx(8), pytest.approx(1000), pytest.approx(1000), 1)
    rows = [row("linear", 64, 1024, 1024), row("linear", 8, 1024, 1024), row("convolution", 8, 1000, 1000)]
    assert nearest_product(rows, shape) == rows[1]
    assert nearest_product(rows[2:], shape) is None


def test_more_samples_than_were_traced_are_more_rows() -> None:
    layer = traced(nn.Linear(1000, 1000), 2, 1000)
    rows = [row("linear", 8, 1024, 1024), row("linear", 64, 1024, 1024)]
    nearest = [nearest_product(rows, shape) for scale in (1, 30) if (shape := shape_of_product(layer, scale))]
    assert nearest == rows


def test_a_convolution_has_its_kernel() -> None:
    layer = traced(nn.Conv2d(64, 128, 3, padding=1, bias=False), 2, 64, 10, 10)
    shape = shape_of_product(layer)
    assert shape is not None
    assert shape[1:] == pytest.approx((200, 64 * 9, 128, 9))
    wide = traced(nn.Conv2d(576, 128, 1, bias=False), 2, 576, 10, 10)
    rows = [row("convolution", 200, 576, 128, 9), row("convolution", 200, 576, 128, 1)]
    assert [nearest_product(rows, shape) for shape in map(shape_of_product, (layer, wide)) if shape] == rows


def test_other_layers_have_no_such_product() -> None:
    assert shape_of_product(traced(nn.ReLU(), 2, 3)) is None
    (attention,) = trace(nn.MultiheadAttention(8, 2), *(torch.empty(2, 3, 8),) * 3).layers[:1]
    assert shape_of_product(attention) is None
