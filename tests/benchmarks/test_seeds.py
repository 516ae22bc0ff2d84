"""Figures of the papers: the committed results are what the functions give, and each difference has its reason."""

from __future__ import annotations

import json
import math
from functools import cache

import pytest
from benchmarks.seeds.figure import SeedFigure, as_json, as_markdown
from benchmarks.seeds.pcl_dnn import planned
from benchmarks.seeds.run import FOLDER, PAGE, figures, with_table

all_figures = cache(figures)


def test_the_results_are_those_of_the_functions() -> None:
    committed = json.loads((FOLDER / "results.json").read_text(encoding="utf-8"))
    made = json.loads(json.dumps(as_json(all_figures())))
    ours = [[math.nan if one["ours"] is None else one.pop("ours") for one in rows] for rows in (committed, made)]
    assert ours[0] == pytest.approx(ours[1], rel=1e-3, nan_ok=True)
    assert committed == made  # all but ours


def test_the_page_has_the_table() -> None:
    table = as_markdown(all_figures()) + "\n"
    assert (FOLDER / "summary.md").read_text(encoding="utf-8") == table
    page = PAGE.read_text(encoding="utf-8")
    assert table in page
    assert with_table(page, table) == page


def test_a_difference_has_a_reason() -> None:
    assert [one for one in all_figures() if not one.close and not one.reason] == []


def test_swcaffes_speedups_agree_with_its_shares_of_communication() -> None:
    """6.3 pairs them in the same order: 1,024 (1 - share) is the speedup, of both networks."""
    found = [one for one in all_figures() if one.system == "swCaffe" and not one.predicted]
    assert [one.ours for one in found] == pytest.approx([one.theirs for one in found], rel=0.015)
    assert len(found) == 5


def test_cd_dnns_rates_are_close_with_the_minibatch_of_the_papers_other_runs() -> None:
    found = [one for one in all_figures() if one.place == "figure 7"]
    assert [one.close for one in found] == [True] * 3 + [False]


def test_the_example_of_the_page() -> None:
    """VGG-A on 16 nodes with 10 Gbit/s Ethernet: 486 of 502 ms are computing; PCL-DNN measured a speedup of 14.2."""
    row = planned("vgg_a", "aws_c4_8xlarge", 256, 16)
    assert (row.computing, row.step) == (pytest.approx(0.486, abs=5e-4), pytest.approx(0.502, abs=5e-4))
    assert row.speedup == pytest.approx(15.5, abs=0.05) == pytest.approx(14.2, rel=0.15)
    assert row.split == {
        "classifier.1": "row 16",
        "classifier.4": "column 8 gives part",
        "classifier.7": "row 8 takes part",
    }


def test_a_table_of_one_figure_of_each_kind() -> None:
    found = [
        SeedFigure("A", "1", "close", 10, 11.0, ("assumed",)),
        SeedFigure("A", "2", "far", 10, 2000.0, ("assumed",), "why"),
        SeedFigure("A", "3", "none", 10, None, (), "why"),
        SeedFigure("A", "4", "at most", 10, 1.0, upper_bound=True),
        SeedFigure("A", "5", "its own", 10, 10.0, predicted=False),
    ]
    lines = as_markdown(found).splitlines()
    assert lines[2:7] == [
        "| A | 1 | close | 10 | 11 | +10% | 1 |",
        "| A | 2 | far | 10 | 2,000 | +19900% | 1, 2 |",
        "| A | 3 | none | 10 | none |  | 2 |",
        "| A | 4 | at most | 10 | 1 | below |  |",
        "| A | 5 | its own | 10 | 10 | +0% |  |",
    ]
    assert lines[-4] == "2 of 4 predicted figures are within 15% or below the paper's bound. Notes:"
    assert lines[-2:] == ["1. assumed", "2. why"]
