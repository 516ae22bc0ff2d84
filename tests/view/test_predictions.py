import pytest
from tests.foresight.entries import entry
from tests.plan.test_run_report import ALONE, FOUR

from unisono.errors import UsageError
from unisono.view.predictions import draw_calibration, draw_plans


def test_planned_runs_have_speedups_and_parts() -> None:
    pytest.importorskip("matplotlib")
    text = draw_plans([ALONE, FOUR], "a title", "a machine").decode()
    for label in ("a title", ">bsp<", ">ideal<", "speedup over one node", ">computing<", ">communication<"):
        assert label in text


def test_calibration_has_a_color_for_each_group_and_errors_by_part() -> None:
    pytest.importorskip("matplotlib")
    text = draw_calibration([entry(0.05), entry(0.2, "1.1"), entry(0.8, "1.1")], "version").decode()
    for label in (">equal<", ">version 1.0<", ">version 1.1<", ">exchanges<", ">measured step<", ">100 ms<"):
        assert label in text


def test_a_ledger_without_runs_has_no_chart() -> None:
    with pytest.raises(UsageError, match="the ledger has no runs to draw"):
        draw_calibration([], "version")
