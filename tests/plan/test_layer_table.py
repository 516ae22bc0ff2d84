"""Table of layers: each with the split, the seconds and the bytes of the functions that it names."""

from __future__ import annotations

import pytest
from tests.plan.test_split import SLOW, cd_dnn, inputs

from unisono.plan.choose_split import choose_splits
from unisono.plan.layer_table import layer_lines, planned_layers
from unisono.plan.machines import MachineFacts, NodeFacts
from unisono.plan.planned_run import PlannedRun
from unisono.plan.split import LayerFacts, sent_of
from unisono.plan.trace import TracedLayer
from unisono.rules import BSP

INPUTS = inputs([*cd_dnn(256), (LayerFacts("relu"), 0.0), (LayerFacts("norm", weights=64), 0.0)], 256, SLOW)
SPLITS = choose_splits(INPUTS).splits
TRACED = [
    *(TracedLayer(f"{at}", "Linear", forward_flops=100, backward_flops=200, parameters=9) for at in range(8)),
    TracedLayer("relu", "ReLU"),
    TracedLayer("norm", "LayerNorm", parameters=16),
]
RUN = PlannedRun(MachineFacts("example", NodeFacts(flops=1e12)), TRACED, 2, BSP(), 256)
ROWS = planned_layers(RUN, INPUTS, SPLITS)


def test_rows_have_the_parts_of_the_splits() -> None:
    assert [row.name for row in ROWS] == [*map(str, range(8)), "norm"]  # a relu computes nothing that counts
    assert sum(row.computing for row in ROWS) == pytest.approx(INPUTS.step.computing.whole)
    assert ROWS[0].flops == 300 * 256 / 2
    assert {row.name: row.parallelism for row in ROWS if row.parallelism != "data"} == SPLITS
    sent = sent_of(INPUTS, INPUTS.layers[1], SPLITS["1"])
    assert ROWS[1][6:9] == (sent.gradients, sent.activations, sent.gradient_bytes + sent.activation_bytes)


def test_the_lines_are_a_table() -> None:
    head, *rest, norm = layer_lines(ROWS)
    assert head.split()[:5] == ["layer", "kind", "GFLOP", "weights", "parallelism"]
    assert "column 4 gives part" in "\n".join(rest)
    assert norm.split()[-2:] == ["9.6e-05", "MB"]
