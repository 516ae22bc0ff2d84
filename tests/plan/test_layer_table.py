"""Table of layers: each with the split, the seconds and the groups of the functions that it names."""

from __future__ import annotations

import pytest
from tests.plan.test_split import SLOW, cd_dnn, inputs

from unisono.plan.choose_split import rank_splits
from unisono.plan.layer_table import layer_lines, planned_layers
from unisono.plan.model_parallel import hybrid_bytes
from unisono.plan.split import LayerFacts, candidate, layer_seconds
from unisono.plan.trace import TracedLayer

FACTS = (*cd_dnn(256), LayerFacts("relu", 0.0), LayerFacts("norm", 0.0, weights=64))
INPUTS = inputs(FACTS, 256, SLOW)
TRACED = [
    *(TracedLayer(f"{at}", "Linear", forward_flops=100, backward_flops=200, parameters=9) for at in range(8)),
    TracedLayer("relu", "ReLU"),
    TracedLayer("norm", "LayerNorm", parameters=16),
]


def test_rows_have_the_parts_of_the_chosen_splits() -> None:
    chosen = rank_splits(INPUTS)[0]
    rows = planned_layers(TRACED, 2, INPUTS, chosen)
    assert [row.name for row in rows] == [*map(str, range(8)), "norm"]  # a relu computes nothing that counts
    assert sum(row.computing for row in rows) == pytest.approx(chosen.prediction.computing)
    assert sum(row.activations for row in rows) == pytest.approx(chosen.prediction.activations)
    assert rows[0].flops == 300 * 256 / 2
    assert {row.name: row.parallelism for row in rows if row.parallelism != "data"} == chosen.words
    assert rows[1].exchange == layer_seconds(INPUTS, FACTS[1], chosen.splits[rows[1].name], chosen.size).gradients


def test_neighbours_of_the_best_groups_do_not_send_less() -> None:
    for row in planned_layers(TRACED, 2, INPUTS, candidate(INPUTS, 1, {}))[:8]:
        shape = next(one.shape for one in FACTS if one.name == row.name)
        assert shape is not None
        assert row.groups == min(row.sent, key=lambda groups: (row.sent[groups], groups))
        assert row.sent == {groups: hybrid_bytes(shape, 256, 4, groups) for groups in row.sent}
    assert planned_layers(TRACED, 2, INPUTS, candidate(INPUTS, 1, {}))[-1][-2:] == (None, {})


def test_the_lines_are_a_table() -> None:
    head, first, *_, norm = layer_lines(planned_layers(TRACED, 2, INPUTS, rank_splits(INPUTS)[0]))
    assert head.split()[:5] == ["layer", "kind", "GFLOP", "weights", "parallelism"]
    assert "column 4 gives part" in first
    assert "1: 0.9011 MB, 2: " in first
    assert norm.split()[-1] == "-"
