"""Choice by trials: what decides, what puts it in doubt, and the interval of the prediction."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.plan.test_choose import NETWORK, ask, at, loads

from unisono.plan.choose import Candidate, Setting, candidates, predicted
from unisono.plan.trials import (
    LARGEST_ERROR,
    MOST_RIVALS,
    NOMINAL_SHARE,
    ROUND_STEPS,
    WIDER_SHARE,
    Trial,
    TrialChoice,
    choose,
    doubt_about,
    is_worth_trial,
    rivals,
    rivals_left,
    steps_per_trial,
)
from unisono.processor import ALONE, ProcessorUse

MIB = 1 << 20

INPUTS = ask(NETWORK, loads, at(1))

ENDS, EQUAL, NONE = (
    predicted(INPUTS, Setting(name, 8 * MIB, end_ratio=ratio))
    for name, ratio in (("chain", 4), ("chain", 1), ("none", 1))
)

HALF = ProcessorUse(others=0.5)


def trials(*steps: Sequence[float]) -> list[Trial]:
    """Return trials of small buckets at both ends, of equal ones, and without overlap: each of 100 ms as predicted."""
    known = [_taking(candidate, 0.1) for candidate in (ENDS, EQUAL, NONE)]
    return [Trial(candidate, each) for candidate, each in zip(known, steps, strict=False)]


def _taking(candidate: Candidate, seconds: float) -> Candidate:
    return candidate._replace(prediction=candidate.prediction._replace(step=seconds))


QUIET = trials([0.100, 0.101, 0.102, 0.150], [0.098, 0.099, 0.099, 0.110], [0.070, 0.071, 0.072, 0.300])
"""The last is clearly faster, but for an outlier; the first two are alike."""


def test_trials_decide_on_cores_of_their_own() -> None:
    chosen, choice = choose(QUIET, "chain", ALONE)
    assert chosen == QUIET[2]
    assert (choice.candidate, choice.doubt) == (QUIET[2].candidate, "")


def test_alike_trials_keep_the_prediction() -> None:
    assert (
        choose(trials([0.1, 0.1, 0.11, 0.1], [0.1, 0.11, 0.1, 0.1]), "chain", ALONE)[0].candidate.setting
        == ENDS.setting
    )


def test_the_simplest_setting_is_kept_on_shared_cores() -> None:
    chosen, choice = choose(QUIET, "chain", HALF)
    assert chosen == QUIET[1]
    assert choice.doubt == "other processes took 50% of the ranks' cores"
    assert choice.use == HALF
    assert len(choice.ratios) == 12, "of all trials"
    assert choose(QUIET, "none", HALF)[0] == QUIET[2], "the overlap of the first steps"
    assert choose(QUIET, "funnel", HALF)[0] == QUIET[0], "no trial has the overlap"


@pytest.mark.parametrize(
    ("predicted_seconds", "took", "worth"),
    [
        (0.114, [], True),
        (0.114, [0.1], True),
        (0.140, [0.13], False),
        (0.140, [0.19, 0.15], True),
        (0.140, [0.19, 0.14], False),
    ],
)
def test_a_setting_is_tried_that_is_predicted_faster_than_what_the_others_took(
    predicted_seconds: float, took: list[float], worth: bool
) -> None:
    best, other = _taking(ENDS, 0.1), _taking(NONE, predicted_seconds)
    assert is_worth_trial(other, best, [Trial(best, [seconds] * 4) for seconds in took]) is worth


@pytest.mark.parametrize(
    ("use", "doubted"),
    [
        (ProcessorUse(others=0.09), False),
        (ProcessorUse(others=0.05, stolen=0.06), True),
        (ProcessorUse(stolen=0.2), True),
        (ProcessorUse(switches=1e6), False),
    ],
)
def test_a_tenth_of_the_cores_puts_trials_in_doubt(use: ProcessorUse, doubted: bool) -> None:
    assert bool(doubt_about(QUIET, use)) is doubted


def test_a_spread_larger_than_the_differences_puts_trials_in_doubt() -> None:
    """Settings differ by a fifth; steps of one setting by half, by half but for an outlier, and by a tenth."""
    wild = trials([0.10, 0.15, 0.12, 0.13], [0.10, 0.15, 0.15, 0.15], [0.10, 0.15, 0.12, 0.13])
    assert doubt_about(wild, ALONE) == "the steps of one setting differ by 30%, the settings by 20%"
    chosen, choice = choose(wild, "chain", ALONE)
    assert (chosen, bool(choice.doubt)) == (wild[1], True)
    outlier = trials([0.10, 0.10, 0.10, 0.15], [0.12, 0.12, 0.12, 0.18])
    assert doubt_about(outlier, ALONE) == ""
    calm = trials([0.10, 0.11, 0.10, 0.11], [0.10, 0.11, 0.11, 0.10])
    assert doubt_about(calm, ALONE) == "", "a tenth is less than what settings are predicted to differ by"


def test_clear_differences_decide_among_wild_steps() -> None:
    timed = trials([0.30, 0.45, 0.36, 0.40], [0.35, 0.50, 0.40, 0.45], [0.10, 0.15, 0.12, 0.13])
    assert choose(timed, "chain", ALONE)[0] == timed[2]


def test_a_trial_takes_a_fifth_of_a_second_in_4_to_6_steps() -> None:
    assert [*map(steps_per_trial, (1e-4, 0.03, 0.04, 0.05, 0.2, 3.0))] == [6, 6, 5, 4, 4, 4]


def test_rivals_are_those_that_a_trial_does_not_part_from_the_kept_setting() -> None:
    """The spread is a fifth; the last setting takes half as long again as the fastest."""
    unsure = trials([0.033, 0.040, 0.040, 0.060], [0.030, 0.037, 0.036, 0.050], [0.050, 0.060, 0.060, 0.070])
    assert rivals(unsure, unsure[0]) == [ENDS.setting, EQUAL.setting]
    assert rivals(unsure, unsure[1]) == [EQUAL.setting, ENDS.setting]
    assert rivals(QUIET, QUIET[2]) == [NONE.setting], "all are apart"
    assert rivals(unsure, unsure[2]) == [NONE.setting, EQUAL.setting, ENDS.setting], "the fastest first"
    assert len(rivals(2 * unsure[:2], unsure[0])) == MOST_RIVALS


def test_medians_decide_between_rivals_and_leave_out_the_slow() -> None:
    chain, none, funnel = EQUAL.setting, NONE.setting, ENDS.setting
    two = 2 * ROUND_STEPS
    slow = {chain: two * [0.03], none: two * [0.029], funnel: two * [0.033]}
    assert rivals_left(slow) == [chain, none, funnel], "3% decide nothing"
    fast = {**slow, none: two * [0.028]}
    assert rivals_left(fast) == [none, chain], "and a sixth is too slow"
    assert rivals_left({chain: two * [0.03], none: ROUND_STEPS * [0.02] + (two - 1) * [0.04]}) == [chain]
    once = {setting: steps[:ROUND_STEPS] for setting, steps in fast.items()}
    assert rivals_left(once) == [chain, none, funnel], "a single round is a busy moment"


STEPS = st.lists(st.floats(0.01, 1), min_size=4, max_size=6)


@given(st.lists(STEPS, min_size=1, max_size=3), st.floats(0, 0.5), st.floats(0, 0.5))
def test_the_choice_is_one_of_the_trials_and_its_interval_has_the_prediction(
    steps: list[list[float]], others: float, stolen: float
) -> None:
    tried = trials(*steps)
    chosen, choice = choose(tried, "chain", ProcessorUse(others, stolen))
    assert chosen in tried
    assert choice.candidate is chosen.candidate
    low, high, share = choice.interval(0.0)
    assert low < 0.1 < high
    assert (low, high) == pytest.approx((0.0925, 0.1075)) or (low < 0.0926 and high > 0.1074 and share == WIDER_SHARE)


def test_the_interval_of_trials_that_were_as_predicted() -> None:
    step = ENDS.prediction.step
    for ratios in ([], [0.97, 1.0, 1.05, 2.0]):
        low, high, share = TrialChoice(ENDS, ratios=ratios).interval(0.0)
        assert (low, high) == pytest.approx((step * (1 - LARGEST_ERROR), step * (1 + LARGEST_ERROR)))
        assert share == NOMINAL_SHARE
    assert TrialChoice(ENDS).interval(step * 0.99)[0] == pytest.approx(step * 0.99), "computing alone takes as long"


def test_the_interval_of_trials_that_took_longer() -> None:
    """The prediction knew too little of them, though they were alike."""
    step = ENDS.prediction.step
    low, high, share = TrialChoice(ENDS, ratios=[1.7] * 4).interval(0.0)
    assert (low, high) == pytest.approx((step * (1 - LARGEST_ERROR), step * 1.7))
    assert share == WIDER_SHARE


def test_the_interval_on_shared_cores() -> None:
    """The others may leave, so that a step takes half as long, or become twice as many: 1.5 times as long."""
    step, ratios = ENDS.prediction.step, [0.8] * 3 + [1.0] * 6 + [1.2] * 3
    low, high, share = TrialChoice(ENDS, "others", HALF, ratios).interval(0.0)
    assert (low, high) == pytest.approx((step * 0.8 * 0.5, step * 1.2 * 1.5))
    assert share == WIDER_SHARE


def test_a_search_of_equal_buckets_has_them_among_its_trials() -> None:
    assert {candidate.setting.end_ratio for candidate in candidates(INPUTS._replace(nodes=1))} == {1}
