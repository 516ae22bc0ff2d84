"""Choice of a setting by its trials, and how far they can be trusted: pure functions of what was measured.

    trial           steps of the slowest rank, in ms     median    spread (of all but the slowest step)
    chain           10.0   10.2   10.4   13.0              10.3      4%
    none             9.0    9.1    9.3    9.9               9.2      3%        differences: 12%

`none` is chosen: all of its steps but the slowest took less time than every step of `chain`. A trial takes a fifth of a
second, in 4 to 6 steps. Trials decide nothing where other processes take a part of the ranks' cores, or where their
spread is larger than both the measured differences and those of the predictions. The simplest setting is kept then:
equal buckets, the overlap of the first steps.

**Rivals.** A fifth of a second is a busy moment of a machine, in which a setting may look a third slower than it is.
Settings that such a trial does not part from the kept one are tried again with it, by turns, as the run goes on:

    steps between the rounds  256    256    256    256      what the second and later ones decide
    chain (kept)               8      8      8      8        the median of all of a setting's steps so far:
    none                       8      8      8      8          5% less than the kept one's: it is kept instead
    funnel                     8      8      -      -          15% more: it is not tried again

One round alone, of a quarter of a second for each, decides nothing.

**Interval.** Where trials are as predicted, the predicted step is right within the largest error of 24 predictions from
measured costs (`benchmarks/overlaps`). The next error of such a series is at most the largest of 24 before with
probability 24/25, if all 25 come in any order alike: its nominal share. Else the interval reaches from the 10th to the
90th percentile of the trials' steps, relative to their predictions. Others may also leave, or become twice as many:
with half of the cores taken, a step takes half as long, or 1.5 times as long (with k busy processes beside each rank
they take k / (k + 1); the rank's share falls from 1 / (k + 1) to 1 / (2k + 1)).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from statistics import median, quantiles
from typing import NamedTuple

from unisono.plan.choose import END_RATIOS, Candidate, Setting
from unisono.processor import ALONE, ProcessorUse, describe

TRIAL_RATIO = 1.15
"""Ratio to the best prediction up to which a setting is worth a trial, whatever the others took."""

LARGEST_ERROR = 0.075
"""Largest error of a step in `benchmarks/overlaps` that was predicted from measured costs, relative to the measured
one."""

NOMINAL_SHARE = 24 / 25
"""Share of steps, 0 to 1, within an interval that reaches to the largest of 24 errors."""

WIDER_SHARE = 0.8
"""Share of steps within an interval from the 10th to the 90th percentile of trials."""

MEASURED_STEPS, TRIALS = 5, 7
"""Steps that are measured before there are times to choose by, and settings with a trial (`reducer/tuning.py`)."""

TRIAL_SECONDS = 0.2
"""Seconds of a trial, so that a busy moment does not decide it."""

LEAST_TRIAL_STEPS, MOST_TRIAL_STEPS = 4, 6
"""Steps over which a setting is measured: least number, and most, so that a search of short steps ends soon."""

MOST_RIVALS, MOST_ROUNDS, ROUND_STEPS, STEPS_BETWEEN_ROUNDS = 3, 4, 8, 256
"""Largest number of settings that are tried again as a run goes on, the kept one among them, and of times that they
are; steps of each that are measured then, after one that is not, and steps of the run before it."""

LEAST_GAIN = 0.05
"""Difference of medians, relative to the kept setting's, from which a rival is kept in its place."""


def steps_per_trial(step: float) -> int:
    """Return the number of steps of a trial where a step is predicted to take `step` seconds."""
    return min(MOST_TRIAL_STEPS, max(LEAST_TRIAL_STEPS, round(TRIAL_SECONDS / step)))


def search_seconds(step: float, unhidden: float) -> float:
    """Return the seconds that a search adds to its steps; `unhidden` are those of one that hides nothing."""
    steps = TRIALS * (1 + steps_per_trial(step))
    return MEASURED_STEPS * max(0.0, unhidden - step) + steps * (TRIAL_RATIO - 1) * step


class Trial(NamedTuple):
    """Setting that was tried, and the seconds of its steps on the slowest rank: four or more."""

    candidate: Candidate
    steps: Sequence[float]

    @property
    def seconds(self) -> float:
        """Median of the steps."""
        return median(self.steps)

    @property
    def spread(self) -> float:
        """Difference of the slowest step but one, an outlier, and the fastest, relative to the fastest."""
        return self.slow / min(self.steps) - 1

    @property
    def slow(self) -> float:
        """Slowest step but one."""
        return sorted(self.steps)[-2]

    @property
    def ratios(self) -> list[float]:
        """Steps relative to their prediction."""
        return [step / self.candidate.prediction.step for step in self.steps]


class TrialChoice(NamedTuple):
    """Chosen setting, and what its prediction is worth."""

    candidate: Candidate
    doubt: str = ""
    """Reason for which trials decided nothing; empty where they decided."""
    use: ProcessorUse = ALONE
    """Use of the ranks' cores by others during the search."""
    ratios: Sequence[float] = ()
    """Steps of trials relative to their predictions: all where there is a doubt, else those of the chosen setting."""

    def interval(self, least: float) -> tuple[float, float, float]:
        """Return both ends of the interval of the predicted step, in seconds, and its nominal share; `least` is what a
        step takes whose exchange takes no time."""
        step = max(least, self.candidate.prediction.step)
        low, high = 1 - LARGEST_ERROR, 1 + LARGEST_ERROR
        if not self.ratios or (not self.doubt and low <= median(self.ratios) <= high):
            return max(least, step * low), step * high, NOMINAL_SHARE
        first, *_, last = quantiles(self.ratios, n=10, method="inclusive")
        taken = self.use.taken
        return step * min(low, first) * (1 - taken), step * max(high, last) * (1 + taken), WIDER_SHARE


def is_worth_trial(candidate: Candidate, best: Candidate, trials: Sequence[Trial]) -> bool:
    """Return True for a setting that is predicted about as fast as the `best`, or faster than all that were tried took:
    overlaps that compute and exchange at once take longer than predicted where the two share cores."""
    step = candidate.prediction.step
    return step <= best.prediction.step * TRIAL_RATIO or step < min(trial.seconds for trial in trials)


def rivals(trials: Sequence[Trial], kept: Trial) -> list[Setting]:
    """Return the kept setting and, the fastest first, those that their trials do not part from it."""
    near = [trial for trial in trials if trial is kept or min(trial.steps) < kept.slow]
    near.sort(key=lambda trial: (trial is not kept, trial.seconds))
    return [trial.candidate.setting for trial in near[:MOST_RIVALS]]


def rivals_left(steps: Mapping[Setting, Sequence[float]]) -> list[Setting]:
    """Return the setting to keep, then its rivals that are not clearly slower, by the seconds of all their steps; the
    first one was kept so far. After a single round, all as they are."""
    if min(map(len, steps.values())) <= ROUND_STEPS:
        return [*steps]
    seconds = {setting: median(each) for setting, each in steps.items()}
    kept, best = next(iter(seconds)), min(seconds, key=lambda setting: seconds[setting])
    kept = best if seconds[best] < (1 - LEAST_GAIN) * seconds[kept] else kept
    return [kept, *(other for other in seconds if other != kept and seconds[other] < TRIAL_RATIO * seconds[kept])]


def choose(trials: Sequence[Trial], overlap: str, use: ProcessorUse) -> tuple[Trial, TrialChoice]:
    """Return the trial of the chosen setting, and the choice. The setting that was predicted to be best is tried first;
    `overlap` is that of the first steps."""
    doubt = doubt_about(trials, use)
    chosen = simplest(trials, overlap) if doubt else reduce(_better, trials)
    ratios = [ratio for trial in trials for ratio in trial.ratios] if doubt else chosen.ratios
    return chosen, TrialChoice(chosen.candidate, doubt, use, ratios)


def doubt_about(trials: Sequence[Trial], use: ProcessorUse) -> str:
    """Return the reason for which trials decide nothing; empty where they can decide."""
    if use.shared:
        return describe(use)
    spread, seconds = median(trial.spread for trial in trials), [trial.seconds for trial in trials]
    differences = max(seconds) / min(seconds) - 1
    if spread > max(differences, TRIAL_RATIO - 1):
        return f"the steps of one setting differ by {spread:.0%}, the settings by {differences:.0%}"
    return ""


def simplest(trials: Sequence[Trial], overlap: str) -> Trial:
    """Return the first trial of equal buckets with this overlap; the first of all where there is none."""
    for trial in trials:
        if (trial.candidate.setting.overlap, trial.candidate.setting.end_ratio) == (overlap, END_RATIOS[0]):
            return trial
    return trials[0]


def _better(first: Trial, other: Trial) -> Trial:
    """Return the first, unless all of the other's steps but its slowest, an outlier, beat the first's fastest.

    Step times vary by a tenth on a busy machine. Of two equal settings, the other would win by chance 1 time in 14
    after four steps, 1 in 132 after six.
    """
    return other if other.slow < min(first.steps) else first
