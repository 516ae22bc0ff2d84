"""Predicted beside measured parts, and the cost that was wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.foresight.entries import PREDICTION, measured

from unisono.foresight.compare import explain, hidden_or_not, ms, step_parts, summarize, whole_step, wrong_part
from unisono.foresight.measurement import Measurement
from unisono.foresight.seal import CostFacts, SealedPrediction
from unisono.processor import ProcessorUse

TUNED = replace(PREDICTION, sealed="after 24 tuning steps", run=replace(PREDICTION.run, machine=""))

TIMES = st.floats(0, 1)


def test_parts_add_up_to_the_step() -> None:
    found = measured(0.05, 0.02, 0.01)
    parts = step_parts(PREDICTION, found)
    assert [one.part for one in parts] == ["computing", "waiting", "loading"]
    whole = whole_step(PREDICTION, found)
    assert sum(one.predicted for one in parts) == pytest.approx(whole.predicted)
    assert sum(one.measured for one in parts) == pytest.approx(whole.measured)
    assert [one.relative for one in parts] == [pytest.approx(0.25), pytest.approx(2 / 3), None]
    assert [one.part for one in hidden_or_not(PREDICTION, found)] == ["exchanges", "updates"]


@pytest.mark.parametrize(
    ("found", "part"),
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
def test_the_part_that_explains_most_of_the_error(found: Measurement, part: str | None) -> None:
    wrong = wrong_part(PREDICTION, found)
    assert (None if wrong is None else wrong.part) == part


@given(TIMES, TIMES, TIMES, TIMES, TIMES)
def test_the_wrong_part_is_wrong_in_the_direction_of_the_step(
    computing: float, waiting: float, loading: float, exchanges: float, updates: float
) -> None:
    found = measured(computing, waiting, loading, exchanges, updates)
    step, wrong = whole_step(PREDICTION, found), wrong_part(PREDICTION, found)
    assert (wrong is None) == (abs(step.off) <= 0.02 * step.predicted)
    if wrong is not None:
        assert wrong.off * step.off > 0
        largest = max(abs(one.off) for one in step_parts(PREDICTION, found) if one.off * step.off > 0)
        assert abs(wrong.off) >= largest / 2
        assert explain(PREDICTION, found).startswith(f"{wrong.part} took ")


@pytest.mark.parametrize(
    ("prediction", "found", "sentence"),
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
            "updates took 22 ms longer than the machine file says: node.memory_bandwidth is too high; probe again",
        ),
        (
            replace(PREDICTION, updating=0.0),
            measured(0.040, 0.032, updates=0.025),
            "updates took 25 ms longer than the machine file says: the file has no node.memory_bandwidth; probe again",
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
def test_sentences(prediction: SealedPrediction, found: Measurement, sentence: str) -> None:
    assert explain(prediction, found).startswith(sentence)


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
    found = replace(measured(0.060, 0.012), processor=ProcessorUse(others=taken))
    assert (
        summarize(prediction, found) == f"measured 72 ms a step, predicted 52 ms (48.1 ms - 55.9 ms), +38%: {sentence}"
    )
    assert (taken > 0.1) is ("the machine was disturbed (other processes took 45%" in explain(prediction, found))


def test_a_line_about_a_prediction_that_was_right() -> None:
    found = replace(measured(0.0425, 0.012), processor=ProcessorUse(others=0.5))
    assert summarize(TUNED, found) == "measured 54.5 ms a step, predicted 52 ms (48.1 ms - 55.9 ms)"


def test_milliseconds() -> None:
    assert [ms(seconds) for seconds in (0.0, 0.00123, 0.0521, 1.23456, 12.0)] == [
        *("0 ms", "1.23 ms", "52.1 ms", "1,234.6 ms", "12,000.0 ms"),
    ]
