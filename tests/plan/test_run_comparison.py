"""Runs before and after a change, row by row."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.plan.test_run_report import ALONE, FOUR

from unisono.plan.run_comparison import changed_rules, compare, comparison_data, comparison_lines

FASTER = replace(FOUR, communication=0.005, low=0.03, high=0.04, speedup=0.1 / 0.035)


def test_a_row_is_compared_with_that_of_its_rule_and_nodes() -> None:
    first, second = compare([ALONE, FOUR], [ALONE, FASTER], "bandwidth=2x")
    assert (first.before, first.after, first.ratio) == (ALONE, ALONE, 1)
    assert (second.before, second.after) == (FOUR, FASTER)
    assert second.ratio == pytest.approx(0.7)
    assert second.differences == pytest.approx({"computing": 0, "communication": -0.015, "update": 0, "loading": 0})


def test_a_rule_that_is_gone_is_compared_with_the_new_one() -> None:
    local = replace(FASTER, rule="local_sgd:16")
    rows = compare([ALONE, FOUR, replace(FOUR, rule="sharded")], [local], "rule=local_sgd:16")
    assert [(row.before.rule, row.after.rule) for row in rows] == [("bsp", local.rule), ("sharded", local.rule)]


def test_a_row_that_only_one_side_has_is_left_out() -> None:
    split = replace(FOUR, rule="bsp + split layers")
    assert [row.before.rule for row in compare([FOUR], [FASTER, split], "latency=2x")] == ["bsp"]


def test_lines_have_before_and_after_and_what_changed() -> None:
    left_out, head, line = comparison_lines(compare([ALONE, FOUR], [ALONE, FASTER], "bandwidth=2x"))
    assert left_out == "what if: steps that change by less than 0.5%, left out: 1"
    assert head.split()[:6] == ["what", "if", "rule", "nodes", "step", "then"]
    for words in ("bandwidth=2x", "50.0 ms", "35.0 ms", "-30%", "communication -15.0 ms", " 2.857"):
        assert words in line
    assert list(comparison_lines(compare([ALONE], [ALONE], "x")))[1:] == []


def test_a_chart_has_the_rules_that_change() -> None:
    sharded = replace(FOUR, rule="sharded")
    rows = changed_rules([ALONE, FOUR, sharded], [ALONE, FASTER, sharded], "bandwidth=2x")
    assert [(row.rule, row.step) for row in rows] == [
        ("bsp, bandwidth=2x", ALONE.step),
        ("bsp, bandwidth=2x", FASTER.step),
    ]


def test_the_form_of_json() -> None:
    (row,) = comparison_data(compare([FOUR], [FASTER], "bandwidth=2x"))
    assert (row["step"], row["step_then"]) == pytest.approx((0.05, 0.035))
    assert set(row) == {
        *("change", "nodes", "rule", "rule_then", "step", "step_then", "ratio", "differences"),
        *("speedup", "speedup_then", "bottleneck_then"),
    }
