"""PCL-DNN's equations for each layer of a network."""

import pytest
from benchmarks.seeds.layers import HEADS, rows_of

from unisono.plan.machines import find_machine


def test_the_worked_examples_are_rows() -> None:
    """C5 of OverFeat-FAST for a sample of a node: 2.2, 2.4 and 3.1; then the text of all layers."""
    *rows, (last,) = rows_of("overfeat_fast", "cori_fdr", samples=1, nodes=64)
    assert len(rows) == 8
    fifth = dict(zip(("none", "all", "block", "sizes", "sums", "busy", "c", "ratio"), rows[3][1:9], strict=True))
    assert fifth == {
        **{"none": "0.5386", "all": "0.0146", "block": "0.0256", "sizes": "1x41x48x12x12x3x3"},
        **{"sums": "1x12", "busy": "0.89", "c": "4", "ratio": "216"},
    }
    assert last.startswith(
        "64 samples a step: the last layer has no bubble on up to 5 nodes; with 64, a node computes 8%"
    )


def test_groups_and_the_first_layer() -> None:
    """AlexNet's second convolution is in two groups, and its first has no gradient of the inputs."""
    first, second, *_ = rows_of("alexnet", "cori_fdr", samples=2, nodes=4)
    assert first[8] == f"{2 * 2 * 2 * 55 * 55 / 4:,.0f}"
    assert second[8] == f"{3 * 2 * 2 * 27 * 27 / 4:,.0f}"


def test_data_or_model_parallelism() -> None:
    """The convolutions of AlexNet send less by data parallelism, its wide layers by model parallelism (3.2)."""
    machine, (*rows, _) = find_machine("cori_fdr"), rows_of("alexnet", "cori_fdr", samples=64, nodes=4)
    cells = [dict(zip(HEADS, row, strict=True)) for row in rows]
    assert [cell["better"] for cell in cells] == [*["data"] * 5, *["model"] * 3]
    seconds = 2 * 4096 * 1000 * 256 / 4 / machine.node.flops + 4 * 4096 * 256 / machine.link.bandwidth
    assert float(cells[-1]["model ms"]) == pytest.approx(1e3 * (seconds + machine.link.latency), abs=0.005)
