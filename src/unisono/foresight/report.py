"""Reports of foresight: the table of a ledger and the comparison of a run, as lines and as JSON data.

ledger ─ calibrate ─▶ a row for each version, the worst runs           run ─ compare ─▶ a row for each part, a sentence
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from unisono.foresight.calibration import calibrate, worst_runs
from unisono.foresight.compare import PartError, explain, hidden_or_not, ms, step_parts, whole_step, wrong_part
from unisono.foresight.ledger import LedgerEntry
from unisono.foresight.measurement import Measurement
from unisono.foresight.seal import SealedPrediction
from unisono.plan.text_table import text_table
from unisono.processor import describe

WORST = 5
"""Number of runs with the largest errors that are listed."""


def ledger_lines(entries: Sequence[LedgerEntry], by: str) -> Iterator[str]:
    """Yield a table of the groups, and the worst runs with the cost that was wrong."""
    rows = [(by, "runs", "error, median", "95th percentile", "within the interval")]
    for found in calibrate(entries, by):
        cover = f"{found.covered} of {found.intervals}, nominally {found.share:.0%}"
        errors = f"{found.median:.1%}", f"{found.high:.1%}"
        rows.append((found.group, str(found.runs), *errors, cover if found.intervals else "no intervals"))
    yield from text_table(rows, left={0})
    yield ""
    yield "the largest errors of a step, |predicted - measured| / measured:"
    for one in worst_runs(entries, WORST):
        name = one.run or one.prediction.run.recipe
        step = f"predicted {ms(one.prediction.step)}, measured {ms(one.measurement.step.median)}"
        yield f"{one.error:6.1%}  {name}, {one.version}: {step}; {explain(one.prediction, one.measurement)}"


def ledger_data(entries: Sequence[LedgerEntry], complaints: Sequence[str], by: str) -> dict[str, Any]:
    """Return the groups, the runs and the complaints as data for JSON: seconds, and shares of 1."""
    return {
        "by": by,
        "groups": [one._asdict() for one in calibrate(entries, by)],
        "runs": [{**asdict(one), "error": one.error, "covered": one.covered} for one in entries],
        "complaints": list(complaints),
    }


def check_lines(prediction: SealedPrediction, measured: Measurement) -> Iterator[str]:
    """Yield the predicted and measured parts of a run's step, and the sentence that says which cost was wrong."""
    yield _title(prediction, measured)
    yield ""
    head = ("", "predicted", "measured", "5% - 95%", "error")
    spreads = {"step": measured.step, "computing": measured.computing, "waiting": measured.waiting}
    spreads |= {"loading": measured.loading, "exchanges": measured.communicating, "updates": measured.updating}

    def row(one: PartError, name: str) -> tuple[str, ...]:
        spread = spreads[one.part]
        error = "-" if one.relative is None else f"{one.relative:+.1%}"
        return name, ms(one.predicted), ms(one.measured), f"{ms(spread.low)} - {ms(spread.high)}", error

    rows = [row(one, one.part) for one in step_parts(prediction, measured)]
    rows.append(row(whole_step(prediction, measured), "step"))
    rows += [row(one, f"{one.part}, hidden or not") for one in hidden_or_not(prediction, measured)]
    yield from text_table([head, *rows], left={0})
    yield ""
    if prediction.high > prediction.low:
        within = prediction.low <= measured.step.median <= prediction.high
        yield (
            f"interval: {ms(prediction.low)} - {ms(prediction.high)}, nominally {prediction.share:.0%} of steps: "
            f"{'it covers' if within else 'it does not cover'} the measured step"
        )
    if prediction.all_steps:
        yield (
            f"{prediction.run.steps:,} steps: predicted {prediction.all_steps:,.1f} s; all steps took "
            f"{measured.all_steps:,.1f} s, the run {measured.wall:,.1f} s with its start, tests and checkpoints"
        )
    if prediction.doubt:
        yield f"trials decided nothing: {prediction.doubt}"
    if measured.processor.shared:
        yield f"shared: {describe(measured.processor)}"
    if measured.disturbed:
        yield f"disturbed: {measured.disturbed}"
    yield explain(prediction, measured)


def check_data(prediction: SealedPrediction, measured: Measurement) -> dict[str, Any]:
    """Return the comparison as data for JSON, in seconds."""
    parts = [whole_step(prediction, measured), *step_parts(prediction, measured), *hidden_or_not(prediction, measured)]
    wrong = wrong_part(prediction, measured)
    return {
        "prediction": asdict(prediction),
        "measurement": asdict(measured),
        "parts": [{**one._asdict(), "error": one.relative} for one in parts],
        "wrong": None if wrong is None else wrong.part,
        "explanation": explain(prediction, measured),
    }


def _title(prediction: SealedPrediction, measured: Measurement) -> str:
    run, nodes = prediction.run, prediction.run.nodes
    on = f"{run.ranks} rank{'s' * (run.ranks > 1)} on {nodes} node{'s' * (nodes > 1)}"
    machine = f", {run.machine}" if run.machine else ""
    return (
        f"{run.recipe}: {run.model}, {run.rule}, {run.batch} samples a step, {on}{machine}; sealed {prediction.sealed}"
        f", measured over {measured.steps} steps after the first {measured.skipped}"
    )
