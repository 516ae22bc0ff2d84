"""Errors and cover of groups of runs, and the table and the JSON of a ledger."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from tests.foresight.entries import entry

from unisono.errors import UsageError
from unisono.foresight.calibration import (
    calibrate,
    check_label,
    facts_of,
    group_of,
    ledger_data,
    ledger_lines,
    part_errors,
    worst_runs,
)


def test_errors_and_cover_of_each_version() -> None:
    """The example of the module, and a version whose predictions have no interval."""
    entries = [entry(0.052), entry(0.054), entry(0.065)]
    (found,) = calibrate(entries)
    assert (found.group, found.runs, found.intervals, found.covered, found.share) == ("1.0", 3, 3, 2, 0.96)
    assert found.median == pytest.approx(0.002 / 0.054)
    assert found.high == pytest.approx(0.2 - 0.1 * (0.2 - 0.002 / 0.054))
    later = entry(0.104, "1.1")
    later = replace(later, prediction=replace(later.prediction, low=0.052, high=0.052))
    first, second = calibrate([later, *entries])
    assert first == found
    assert (second.group, second.median, second.intervals, second.share) == ("1.1", pytest.approx(0.5), 0, 0.0)


def test_groups_by_labels_and_by_facts() -> None:
    entries = [entry(links="fast"), entry(links="slow"), entry()]
    assert [one.group for one in calibrate(entries, "links")] == ["-", "fast", "slow"]
    assert [(one.group, one.runs) for one in calibrate(entries, "rule")] == [("bsp", 3)]
    assert group_of(entry(rule="mine"), "rule") == "mine"
    assert facts_of(entry())["sealed"] == "before"
    for by in ("links", "machine"):
        check_label(entries, by)
    with pytest.raises(UsageError, match=r"--by color: no run has this label; there are links, machine, model, "):
        check_label(entries, "color")
    check_label([], "color")


def test_the_worst_come_first() -> None:
    steps = [0.052, 0.030, 0.080, 0.055]
    assert [one.measurement.step.median for one in worst_runs([entry(step) for step in steps], 3)] == [
        pytest.approx(step) for step in (0.030, 0.080, 0.055)
    ]


def test_errors_of_parts_are_shares_of_the_measured_step() -> None:
    found = part_errors(entry(0.065))
    assert list(found) == ["step", "computing", "waiting", "loading", "exchanges", "updates"]
    assert found["step"] == pytest.approx(-0.2)
    assert found["computing"] + found["waiting"] + found["loading"] == pytest.approx(found["step"])


def test_the_table_of_a_ledger() -> None:
    entries = [entry(0.052), entry(0.065), replace(entry(0.104, "1.1"), run="fast/prediction.json")]
    head, first, second, _, title, worst, *others = ledger_lines(entries, "version")
    assert head.split("  ")[0] == "version"
    assert first.split() == ["1.0", "2", "10.0%", "19.0%", "1", "of", "2,", "nominally", "96%"]
    assert second.split()[:4] == ["1.1", "1", "50.0%", "50.0%"]
    assert title.startswith("the largest errors")
    assert worst.startswith(
        " 50.0%  fast/prediction.json, 1.1: predicted 52 ms, measured 104.0 ms; computing took 130%"
    )
    assert [line.split()[0] for line in others] == ["20.0%", "0.0%"]


def test_runs_without_intervals() -> None:
    one = entry()
    one = replace(one, prediction=replace(one.prediction, low=0.052, high=0.052))
    assert next(line for line in ledger_lines([one], "rule") if line.startswith("bsp")).endswith("no intervals")


def test_the_form_of_a_ledgers_json() -> None:
    entries = [entry(0.065)]
    data = json.loads(json.dumps(ledger_data(entries, ["a complaint"], "rule")))
    assert data == {
        "by": "rule",
        "groups": [
            {
                **{"group": "bsp", "runs": 1, "intervals": 1, "covered": 0, "share": 0.96},
                **dict.fromkeys(("median", "high"), pytest.approx(0.2)),
            }
        ],
        "runs": [{**json.loads(json.dumps(asdict(entries[0]))), "error": pytest.approx(0.2), "covered": False}],
        "complaints": ["a complaint"],
    }
