"""Reports of a ledger and of a run, as lines and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from tests.foresight.entries import PREDICTION, entry, measured

from unisono.foresight.measurement import Measurement, as_json, from_json
from unisono.foresight.report import check_data, check_lines, ledger_data, ledger_lines
from unisono.foresight.seal import SealedPrediction
from unisono.processor import ProcessorUse


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


def test_a_run_on_shared_cores() -> None:
    """Both records of the run have what others took: the seal during the trials, the measurement afterwards."""
    doubted = replace(PREDICTION, doubt="a doubt", processor=ProcessorUse(others=0.4))
    found = replace(measured(0.0524, 0.012), processor=ProcessorUse(others=0.3))
    lines = list(check_lines(from_json(SealedPrediction, as_json(doubted)), from_json(Measurement, as_json(found))))
    assert "trials decided nothing: a doubt" in lines
    assert "shared: other processes took 30% of the ranks' cores" in lines
    assert not any(line.startswith(("trials", "shared")) for line in check_lines(PREDICTION, measured(0.0524, 0.012)))


def test_a_run_part_by_part() -> None:
    found = replace(measured(0.0524, 0.012), disturbed="a sign")
    lines = list(check_lines(PREDICTION, found))
    assert lines[0] == (
        "digits: small_convnet, bsp, 64 samples a step, 4 ranks on 2 nodes, ours; sealed before the first step, "
        "measured over 200 steps after the first 30"
    )
    rows = {line.split("  ")[0]: line.split() for line in lines[3:9]}
    assert list(rows) == [
        *("computing", "waiting", "loading", "step", "exchanges, hidden or not", "updates, hidden or not"),
    ]
    assert rows["computing"][1:] == ["40", "ms", "52.4", "ms", "51.4", "ms", "-", "53.4", "ms", "+31.0%"]
    assert rows["loading"][-1] == "-"
    assert rows["step"][-1] == "+23.8%"
    assert lines[10] == ("interval: 48.1 ms - 55.9 ms, nominally 96% of steps: it does not cover the measured step")
    assert lines[11] == (
        "1,000 steps: predicted 52.0 s; all steps took 58.0 s, the run 60.0 s with its start, tests and checkpoints"
    )
    assert lines[12] == "disturbed: a sign"
    assert lines[13].startswith("computing took 31% longer than the machine file says")


def test_the_form_of_a_runs_json() -> None:
    data = json.loads(json.dumps(check_data(PREDICTION, measured(0.0524, 0.012))))
    assert list(data) == ["prediction", "measurement", "parts", "wrong", "explanation"]
    assert [one["part"] for one in data["parts"]] == [
        *("step", "computing", "waiting", "loading", "exchanges", "updates"),
    ]
    assert data["wrong"] == "computing"
    assert check_data(PREDICTION, measured(0.040, 0.012))["wrong"] is None
