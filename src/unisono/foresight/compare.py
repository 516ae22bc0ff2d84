"""Predicted and measured step, part by part, and the cost that was wrong.

                    predicted   measured
    computing         40 ms       52 ms    +30%  ◀─ 12 of the step's 13 ms: this cost was wrong
    waiting           12 ms       13 ms     +8%     communication and updates that do not hide
    loading            0 ms        0 ms
    step              52 ms       65 ms    +25%

`docs/planning_accuracy.md` says how the cost is found. Worked example, 4 ranks, 2 nodes: exchanges of 30 ms, of which
10 ms do not hide, take 42 ms, and waiting takes 22 ms instead of 10 ms: communication took 40% longer, link.bandwidth
is too high.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from unisono.foresight.seal import Measurement, SealedPrediction, Spread
from unisono.formats import counted, text_table
from unisono.plan.trials import LARGEST_ERROR
from unisono.processor import compare_use, describe

RIGHT = 0.02
"""Error of a step, relative to its prediction, up to which no cost is called wrong."""

UNEQUAL = 1.1
"""Ratio of the slowest rank's computing to the mean from which ranks are called unequal."""

EXPLAINS = 0.5
"""Share of an error that another must reach to explain it: that of exchanges or of updates the waiting, and the slowest
rank's computing beyond the mean that of computing."""


class PartError(NamedTuple):
    """Part of a step: its predicted and its measured seconds."""

    part: str
    predicted: float
    spread: Spread

    @property
    def measured(self) -> float:
        """Median of the measured seconds."""
        return self.spread.median

    @property
    def off(self) -> float:
        """Measured less predicted seconds."""
        return self.measured - self.predicted

    @property
    def relative(self) -> float | None:
        """Error relative to the prediction; None where no time was predicted."""
        return self.off / self.predicted if self.predicted else None

    @property
    def longer(self) -> str:
        """Error in words: a share of the prediction, or where that is small a time."""
        share = self.relative
        size = ms(abs(self.off)) if share is None or abs(share) >= 2 else f"{abs(share):.0%}"
        return f"{size} {'longer' if self.off > 0 else 'less'}"


IN_TURN, OF_WAITING = ("computing", "waiting", "loading"), ("exchanges", "updates")
"""Parts that add up to the step, and those that are behind its waiting, hidden or not."""


def errors_of(prediction: SealedPrediction, measured: Measurement) -> dict[str, PartError]:
    """Return the step and its parts by their names."""
    parts = prediction.parts
    errors = (
        PartError("step", prediction.step, measured.step),
        PartError("computing", parts.computing, measured.computing),
        PartError("waiting", parts.communication + parts.update, measured.waiting),
        PartError("loading", parts.loading, measured.loading),
        PartError("exchanges", prediction.communicating, measured.communicating),
        PartError("updates", prediction.updating, measured.updating),
    )
    return {error.part: error for error in errors}


def wrong_part(parts: Mapping[str, PartError]) -> PartError | None:
    """Return the part whose error explains most of the step's error: "computing", "loading", "exchanges", "updates", or
    "waiting" where neither of the last two explains it; None where the step was right."""
    step = parts["step"]
    if abs(step.off) <= RIGHT * step.predicted:
        return None
    sign = 1.0 if step.off > 0 else -1.0
    worst, cause = (
        max((parts[name] for name in names), key=lambda part: sign * part.off) for names in (IN_TURN, OF_WAITING)
    )
    explained = worst.part == "waiting" and sign * cause.off >= EXPLAINS * sign * worst.off
    return cause if explained else worst


def explain(prediction: SealedPrediction, measured: Measurement) -> str:
    """Return a sentence: the cost that was wrong, the value behind it, and a remedy."""
    parts = errors_of(prediction, measured)
    step, part = parts["step"], wrong_part(parts)
    if part is None:
        return f"the step was right: it took {ms(step.measured)}, predicted {ms(step.predicted)}"
    value, remedy = _value_and_remedy(part, prediction, measured)
    source = "the machine file says" if prediction.from_machine else "the first steps measured"
    share = ""
    if part.part in ("computing", "loading"):
        share = f"; that is {part.off / step.off:.0%} of the step's error"
        if round(part.off / step.off, 2) > 1:
            share = "; other parts made up for some of it"
    return f"{part.part} took {part.longer} than {source}: {value}; {remedy}{share}"


def summarize(prediction: SealedPrediction, measured: Measurement) -> str:
    """Return a line: the measured and the predicted step, and where they differ the reason, as far as it is known."""
    step = errors_of(prediction, measured)["step"]
    line = f"measured {ms(step.measured)} a step, predicted {step_words(prediction)}"
    if abs(step.off) <= LARGEST_ERROR * step.predicted:
        return line
    why = _use_of_cores(prediction, measured) or explain(prediction, measured)
    return f"{line}, {step.off / step.predicted:+.0%}: {why}"


def _use_of_cores(prediction: SealedPrediction, measured: Measurement) -> str:
    """Return what others took of the ranks' cores; empty where that was little."""
    return compare_use(None if prediction.from_machine else prediction.processor, measured.processor)


def _value_and_remedy(part: PartError, prediction: SealedPrediction, measured: Measurement) -> tuple[str, str]:
    """Return the value that was wrong, and a remedy."""
    high, low = ("high", "low") if part.off > 0 else ("low", "high")
    if part.part == "loading" and part.off < 0:
        return "samples load faster than its rates of disk and decoding say", "probe again"
    if part.part == "loading":
        return "loading does not keep up with the steps", "give it more threads, or a faster disk"
    if part.part == "waiting":
        hidden = "less" if part.off > 0 else "more"
        remedy = "leave them a core, or try another overlap" if part.off > 0 else "no value is wrong"
        return f"exchanges and updates took about as long as predicted, but {hidden} of them was hidden", remedy
    if part.part == "computing":
        mean, slowest, rank = measured.mean_computing, measured.computing.median, measured.slowest
        if slowest - mean >= max(EXPLAINS * part.off, (UNEQUAL - 1) * mean) and part.off > 0:
            return f"rank {rank} computes {slowest / mean:.2f} times as long as the mean of ranks", "free its cores"
        value = f"node.flops is too {high} for these layers"
    elif part.part == "updates":
        name = "node.memory_bandwidth (of accelerators node.device_bandwidth)"
        value = f"{name} is too {high}" if part.predicted else f"the file has no {name}"
    elif not part.predicted:
        value = "the file gives exchanges between these ranks no time"
    elif prediction.run.nodes == 1:
        value = f"the file's rows of [[collective]] on one node are too {'short' if part.off > 0 else 'long'}"
    else:  # the value behind the larger share of the predicted exchanges
        links = prediction.program.nbytes * prediction.costs.per_byte / prediction.program.period
        value = f"link.latency is too {low}" if links < part.predicted / 2 else f"link.bandwidth is too {high}"
    again = "probe again" if prediction.from_machine else "run again on a machine that does nothing else"
    if sign := _use_of_cores(prediction, measured) or measured.disturbed:
        again = f"the machine was disturbed ({sign}): run again"
    have = "has" if part.part == "computing" else "have"
    return value if prediction.from_machine else f"{part.part} {have} changed since", again


def step_words(prediction: SealedPrediction) -> str:
    """Return the predicted step as text, with its interval where it has one."""
    interval = f" ({ms(prediction.low)} - {ms(prediction.high)})" if prediction.has_interval else ""
    return f"{ms(prediction.step)}{interval}"


def ms(seconds: float) -> str:
    """Return seconds as text, in milliseconds."""
    return f"{seconds * 1e3:,.3g} ms" if abs(seconds) < 0.1 else f"{seconds * 1e3:,.1f} ms"


def check_lines(prediction: SealedPrediction, measured: Measurement) -> Iterator[str]:
    """Yield the predicted and measured parts of a run's step, and the sentence that says which cost was wrong."""
    run, parts = prediction.run, errors_of(prediction, measured)
    on = f"{counted(run.ranks, 'rank')} on {counted(run.nodes, 'node')}"
    yield (
        f"{run.recipe}: {run.model}, {run.rule}, {run.batch} samples a step, {on}{run.machine and f', {run.machine}'}; "
        f"sealed {prediction.sealed}, measured over {measured.steps} steps after the first {measured.skipped}"
    )
    yield ""
    rows = [("", "predicted", "measured", "5% - 95%", "error")]
    for name in (*IN_TURN, "step", *OF_WAITING):
        part, label = parts[name], f"{name}, hidden or not" if name in OF_WAITING else name
        error = "-" if part.relative is None else f"{part.relative:+.1%}"
        extent = f"{ms(part.spread.low)} - {ms(part.spread.high)}"
        rows.append((label, ms(part.predicted), ms(part.measured), extent, error))
    yield from text_table(rows, left={0})
    yield ""
    if prediction.has_interval:
        within = prediction.low <= measured.step.median <= prediction.high
        yield (
            f"interval: {ms(prediction.low)} - {ms(prediction.high)}, nominally {prediction.share:.0%} of steps: "
            f"{'it covers' if within else 'it does not cover'} the measured step"
        )
    if measured.all_steps:
        count = measured.timed
        prefix = f"{count:,} steps: predicted {count * prediction.step:,.2f} s, took" if count else "all steps took"
        total = f"the run {measured.wall:,.2f} s with its start, tests and checkpoints"
        yield f"{prefix} {measured.all_steps:,.2f} s; {total}"
    if prediction.doubt:
        yield f"trials decided nothing: {prediction.doubt}"
    if measured.processor.shared:
        yield f"shared: {describe(measured.processor)}"
    if measured.disturbed:
        yield f"disturbed: {measured.disturbed}"
    yield explain(prediction, measured)


def check_data(prediction: SealedPrediction, measured: Measurement) -> dict[str, Any]:
    """Return the comparison as data for JSON, in seconds."""
    parts = errors_of(prediction, measured)
    wrong = wrong_part(parts)
    return {
        "prediction": asdict(prediction),
        "measurement": asdict(measured),
        "parts": [
            {"part": name, "predicted": part.predicted, "measured": part.measured, "error": part.relative}
            for name, part in parts.items()
        ],
        "wrong": None if wrong is None else wrong.part,
        "explanation": explain(prediction, measured),
    }
