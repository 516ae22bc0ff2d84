"""Predicted beside measured parts, the cost that was wrong, and both as lines and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.foresight.entries import PREDICTION, measured

from unisono.foresight.compare import IN_TURN, check_data, check_lines, errors_of, explain, ms, summarize, wrong_part
from unisono.foresight.seal import CostFacts, Measurement, SealedPrediction
from unisono.processor import ProcessorUse
from unisono.tables import as_json, from_json

TUNED = replace(PREDICTION, sealed="after 24 tuning steps", run=replace(PREDICTION.run, machine=""))

TIMES = st.floats(0, 1)


def test_parts_add_up_to_the_step() -> None:
    measurement = measured(0.05, 0.02, 0.01)
    errors = errors_of(PREDICTION, measurement)
    assert list(errors) == ["step", "computing", "waiting", "loading", "exchanges", "updates"]
    parts, step = [errors[name] for name in IN_TURN], errors["step"]
    assert sum(part.predicted for part in parts) == pytest.approx(step.predicted)
    assert sum(part.measured for part in parts) == pytest.approx(step.measured)
    assert [part.relative for part in parts] == [pytest.approx(0.25), pytest.approx(2 / 3), None]


@pytest.mark.parametrize(
    ("measurement", "part"),
    [
        (measured(0.0525, 0.012), "computing"),
        (measured(0.030, 0.012), "computing"),
        (measured(0.040, 0.012, 0.030), "loading"),
        (measured(0.040, 0.022, exchanges=0.042), "exchanges"),
        (measured(0.040, 0.002, exchanges=0.020), "exchanges"),
        (measured(0.040, 0.032, updates=0.025), "updates"),
        (measured(0.040, 0.032), "waiting"),
        (measured(0.040, 0.032, exchanges=0.035), "waiting"),
        (measured(0.035, 0.030, exchanges=0.050), "exchanges"),
        (measured(0.040, 0.0125), None),
    ],
)
def test_the_part_that_explains_most_of_the_error(measurement: Measurement, part: str | None) -> None:
    wrong = wrong_part(errors_of(PREDICTION, measurement))
    assert (None if wrong is None else wrong.part) == part


@given(TIMES, TIMES, TIMES, TIMES, TIMES)
def test_the_wrong_part_is_wrong_in_the_direction_of_the_step(
    computing: float, waiting: float, loading: float, exchanges: float, updates: float
) -> None:
    measurement = measured(computing, waiting, loading, exchanges, updates)
    parts = errors_of(PREDICTION, measurement)
    step, wrong = parts["step"], wrong_part(parts)
    assert (wrong is None) == (abs(step.off) <= 0.02 * step.predicted)
    if wrong is not None:
        assert wrong.off * step.off > 0
        largest = max(abs(part.off) for part in (parts[name] for name in IN_TURN) if part.off * step.off > 0)
        assert abs(wrong.off) >= largest / 2
        assert explain(PREDICTION, measurement).startswith(f"{wrong.part} took ")


@pytest.mark.parametrize(
    ("prediction", "measurement", "sentence"),
    [
        (
            PREDICTION,
            measured(0.0524, 0.012),
            "computing took 31% longer than the machine file says: node.flops is too high for these layers; probe "
            "again; that is 100% of the step's error",
        ),
        (
            PREDICTION,
            measured(0.030, 0.013),
            "computing took 25% less than the machine file says: node.flops is too low for these layers; probe again; "
            "other parts made up for some of it",
        ),
        (
            TUNED,
            measured(0.0524, 0.012),
            "computing took 31% longer than the first steps measured: computing has changed since; run again on a "
            "machine that does nothing else",
        ),
        (
            PREDICTION,
            measured(0.040, 0.022, exchanges=0.042),
            "exchanges took 40% longer than the machine file says: link.bandwidth is too high; probe again",
        ),
        (
            replace(PREDICTION, costs=CostFacts(1e-2, 1e-10, 1e-10)),
            measured(0.040, 0.022, exchanges=0.042),
            "exchanges took 40% longer than the machine file says: link.latency is too low; probe again",
        ),
        (
            replace(PREDICTION, costs=CostFacts(), communicating=0.0),
            measured(0.040, 0.042, exchanges=0.042),
            "exchanges took 42 ms longer than the machine file says: the file gives exchanges between these ranks no "
            "time; probe again",
        ),
        (
            PREDICTION,
            measured(0.040, 0.032, updates=0.025),
            "updates took 22 ms longer than the machine file says: node.memory_bandwidth (of accelerators "
            "node.device_bandwidth) is too high; probe again",
        ),
        (
            replace(PREDICTION, updating=0.0),
            measured(0.040, 0.032, updates=0.025),
            "updates took 25 ms longer than the machine file says: the file has no node.memory_bandwidth (of "
            "accelerators node.device_bandwidth); probe again",
        ),
        (
            PREDICTION,
            measured(0.040, 0.022),
            "waiting took 83% longer than the machine file says: exchanges and updates took about as long as "
            "predicted, but less of them was hidden; leave them a core",
        ),
        (
            PREDICTION,
            measured(0.040, 0.012, 0.030),
            "loading took 30 ms longer than the machine file says: loading does not keep up with the steps; give it "
            "more threads, or a faster disk",
        ),
        (
            replace(PREDICTION, parts=replace(PREDICTION.parts, loading=0.03)),
            measured(0.040, 0.012, 0.003),
            "loading took 90% less than the machine file says: samples load faster than its rates of disk and decoding "
            "say; probe again",
        ),
        (
            replace(PREDICTION, run=replace(PREDICTION.run, nodes=1)),
            measured(0.040, 0.022, exchanges=0.042),
            "exchanges took 40% longer than the machine file says: the file's rows of [[collective]] on one node are "
            "too short; probe again",
        ),
        (
            PREDICTION,
            replace(measured(0.0525, 0.012), mean_computing=0.042, slowest=3),
            "computing took 31% longer than the machine file says: rank 3 computes 1.25 times as long as the mean of "
            "ranks; free its cores",
        ),
        (
            PREDICTION,
            replace(measured(0.080, 0.012), mean_computing=0.070),
            "computing took 100% longer than the machine file says: node.flops is too high",
        ),
        (
            PREDICTION,
            replace(measured(0.0525, 0.012), disturbed="a sign"),
            "computing took 31% longer than the machine file says: node.flops is too high for these layers; the "
            "machine was disturbed (a sign): run again",
        ),
        (PREDICTION, measured(0.040, 0.0121), "the step was right: it took 52.1 ms, predicted 52 ms"),
    ],
)
def test_sentences(prediction: SealedPrediction, measurement: Measurement, sentence: str) -> None:
    assert explain(prediction, measurement).startswith(sentence)


@pytest.mark.parametrize(
    ("prediction", "taken", "sentence"),
    [
        (TUNED, 0.45, "other processes took 45% of the ranks' cores; in the first steps 0%"),
        (PREDICTION, 0.45, "other processes took 45% of the ranks' cores"),
        (
            replace(TUNED, processor=ProcessorUse(others=0.5)),
            0.05,
            "other processes took 5% of the ranks' cores; in the first steps 50%",
        ),
        (TUNED, 0.0, explain(TUNED, measured(0.060, 0.012))),
    ],
)
def test_a_line_says_why_a_prediction_missed(prediction: SealedPrediction, taken: float, sentence: str) -> None:
    measurement = replace(measured(0.060, 0.012), processor=ProcessorUse(others=taken))
    assert (
        summarize(prediction, measurement)
        == f"measured 72 ms a step, predicted 52 ms (48.1 ms - 55.9 ms), +38%: {sentence}"
    )
    assert (taken > 0.1) is ("the machine was disturbed (other processes took 45%" in explain(prediction, measurement))


def test_a_line_about_a_prediction_that_was_right() -> None:
    measurement = replace(measured(0.0425, 0.012), processor=ProcessorUse(others=0.5))
    assert summarize(TUNED, measurement) == "measured 54.5 ms a step, predicted 52 ms (48.1 ms - 55.9 ms)"


def test_milliseconds() -> None:
    assert [ms(seconds) for seconds in (0.0, 0.00123, 0.0521, 1.23456, 12.0)] == [
        *("0 ms", "1.23 ms", "52.1 ms", "1,234.6 ms", "12,000.0 ms"),
    ]


def test_a_run_on_shared_cores() -> None:
    """Both records of the run have what others took: the seal during the trials, the measurement afterwards."""
    doubted = replace(PREDICTION, doubt="a doubt", processor=ProcessorUse(others=0.4))
    measurement = replace(measured(0.0524, 0.012), processor=ProcessorUse(others=0.3))
    lines = list(
        check_lines(
            from_json(SealedPrediction, as_json(doubted), "a"), from_json(Measurement, as_json(measurement), "b")
        )
    )
    assert "trials decided nothing: a doubt" in lines
    assert "shared: other processes took 30% of the ranks' cores" in lines
    assert not any(line.startswith(("trials", "shared")) for line in check_lines(PREDICTION, measured(0.0524, 0.012)))


def test_a_run_part_by_part() -> None:
    measurement = replace(measured(0.0524, 0.012), disturbed="a sign")
    lines = list(check_lines(PREDICTION, measurement))
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
        "1,100 steps: predicted 57.20 s, took 58.00 s; the run 60.00 s with its start, tests and checkpoints"
    )
    assert lines[12] == "disturbed: a sign"
    assert lines[13].startswith("computing took 31% longer than the machine file says")
    content = {name: value for name, value in asdict(measurement).items() if name != "timed"}
    older = from_json(Measurement, json.dumps(content).encode(), "the file of an older release")
    assert "all steps took 58.00 s; the run 60.00 s with its start, tests and checkpoints" in check_lines(
        PREDICTION, older
    )


def test_the_form_of_a_runs_json() -> None:
    data = json.loads(json.dumps(check_data(PREDICTION, measured(0.0524, 0.012))))
    assert list(data) == ["prediction", "measurement", "parts", "wrong", "explanation"]
    assert [part["part"] for part in data["parts"]] == [
        *("step", "computing", "waiting", "loading", "exchanges", "updates"),
    ]
    assert data["wrong"] == "computing"
    assert check_data(PREDICTION, measured(0.040, 0.012))["wrong"] is None
