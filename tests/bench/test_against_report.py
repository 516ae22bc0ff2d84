"""Table, summary and heat map of the comparison."""

import json

import pytest

from unisono.bench.against_report import Cell, cell_of, draw, summary, table


def us(after: list[float], back: list[float]) -> dict[str, list[float]]:
    return {"after a barrier": after, "back to back": back}


FOUND = {
    "ranks": 2,
    "rounds": 3,
    "libraries": {"ours": "MPICH 5", "mpich": "MPICH 5", "gloo": "torch 2"},
    "rows": [
        {"collective": "allreduce", "bytes": 4, "us": {
            "ordinary": us([3, 4, 2], [1, 1, 1]), "windows": us([2, 2, 2], [4, 4, 4]),
            "mpich": us([2, 4, 4], [5, 5, 5]), "gloo": us([90, 90, 90], [2, 2, 2]),
            "copy": us([0.5, 0.5, 0.5], [0.1, 0.1, 0.1])}},
        {"collective": "allreduce", "bytes": 64, "us": {
            "ordinary": us([4, 4, 4], [1, 1, 1]), "windows": us([2.2, 2.2, 2.2], [3, 3, 3]),
            "mpich": us([2, 2, 2], [3, 3, 3]), "gloo": us([9, 9, 9], [3, 3, 3]),
            "copy": us([0.5, 0.5, 0.5], [0.1, 0.1, 0.1])}},
    ],
}  # fmt: skip


def test_a_cell_is_a_ratio_to_the_best_peer_of_that_timing() -> None:
    assert cell_of(FOUND["rows"][0], "ordinary", "after a barrier") == Cell(0.75, 0.5, 1.5, "mpich")
    assert cell_of(FOUND["rows"][0], "windows", "back to back") == Cell(2, 2, 2, "gloo")


def test_the_table_names_the_peer_and_marks_what_is_slower() -> None:
    lines = table(FOUND).splitlines()
    assert lines[0].startswith("2 ranks on one machine, medians of 3 rounds; ours: MPICH 5; mpich: MPICH 5; gloo: ")
    cells = [cell.strip() for cell in lines[-2].strip("|").split("|")]
    ratios = ["0.75 (0.50-1.50) mpich", "0.50 (0.50-1.00) mpich", "0.50 (0.50-0.50) gloo", "**2.00** (2.00-2.00) gloo"]
    assert cells == [
        *("allreduce", "4"), *ratios, "3.0 / 1.0", "2.0 / 4.0", "4.0 / 5.0", "90.0 / 2.0", "0.5 / 0.1",
    ]  # fmt: skip
    assert len({line.count("|") for line in lines[4:]}) == 1, "every row has as many cells as the head"


def test_shares_of_cells() -> None:
    assert summary(FOUND) == [
        "ordinary, after a barrier: of 2 cells 50% at most 1.05, 50% at most 1.15",
        "windows, after a barrier: of 2 cells 50% at most 1.05, 100% at most 1.15",
        "ordinary, back to back: of 2 cells 100% at most 1.05, 100% at most 1.15",
        "windows, back to back: of 2 cells 50% at most 1.05, 50% at most 1.15",
    ]


def test_the_heat_map_has_the_cells_of_the_table() -> None:
    pytest.importorskip("matplotlib")
    drawn = draw(json.loads(json.dumps(FOUND))).decode()
    for words in (">0.75 mpich<", ">2.00 gloo<", ">allreduce, 4 B<", "medians of 3 rounds"):
        assert words in drawn
