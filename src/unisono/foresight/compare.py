"""Predicted and measured step, part by part, and the cost that was wrong.

                    predicted   measured
    computing         40 ms       52 ms    +30%  ◀─ 12 of the step's 13 ms: this cost was wrong
    waiting           12 ms       13 ms     +8%     communication and updates that do not hide
    loading            0 ms        0 ms
    step              52 ms       65 ms    +25%

A rank that waits does not know whether for an exchange or for an update, so both are one part here. Where that part is
wrong, the times of all exchanges and of all updates, hidden or not, tell which of them is: the one that is further off,
in seconds, in the direction of the waiting. Where neither is, less of them was hidden than predicted.

Worked example, 4 ranks, 2 nodes: exchanges of 30 ms, of which 10 ms do not hide, take 42 ms, and waiting takes 22 ms
instead of 10 ms: communication took 40% longer, link.bandwidth is too high.
"""

from __future__ import annotations

from typing import NamedTuple

from unisono.foresight.measurement import Measurement
from unisono.foresight.seal import SealedPrediction
from unisono.plan.trials import LARGEST_ERROR
from unisono.processor import compare_use

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
    measured: float

    @property
    def off(self) -> float:
        """Measured less predicted seconds."""
        return self.measured - self.predicted

    @property
    def relative(self) -> float | None:
        """Error relative to the prediction; None where no time was predicted."""
        return self.off / self.predicted if self.predicted else None


def step_parts(prediction: SealedPrediction, measured: Measurement) -> list[PartError]:
    """Return the parts that add up to the step."""
    parts = prediction.parts
    return [
        PartError("computing", parts.computing, measured.computing.median),
        PartError("waiting", parts.communication + parts.update, measured.waiting.median),
        PartError("loading", parts.loading, measured.loading.median),
    ]


def whole_step(prediction: SealedPrediction, measured: Measurement) -> PartError:
    """Return the step itself."""
    return PartError("step", prediction.step, measured.step.median)


def hidden_or_not(prediction: SealedPrediction, measured: Measurement) -> list[PartError]:
    """Return all exchanges and all updates of a step, hidden or not."""
    return [
        PartError("exchanges", prediction.communicating, measured.communicating.median),
        PartError("updates", prediction.updating, measured.updating.median),
    ]


def wrong_part(prediction: SealedPrediction, measured: Measurement) -> PartError | None:
    """Return the part whose error explains most of the step's error: "computing", "loading", "exchanges", "updates", or
    "waiting" where neither of the last two explains it; None where the step was right."""
    step = whole_step(prediction, measured)
    if abs(step.off) <= RIGHT * step.predicted:
        return None
    sign = 1.0 if step.off > 0 else -1.0
    worst = max(step_parts(prediction, measured), key=lambda one: sign * one.off)
    if worst.part != "waiting":
        return worst
    cause = max(hidden_or_not(prediction, measured), key=lambda one: sign * one.off)
    return cause if sign * cause.off >= EXPLAINS * sign * worst.off else worst


def explain(prediction: SealedPrediction, measured: Measurement) -> str:
    """Return a sentence: the cost that was wrong, the value behind it, and a remedy."""
    step, part = whole_step(prediction, measured), wrong_part(prediction, measured)
    if part is None:
        return f"the step was right: it took {ms(step.measured)}, predicted {ms(step.predicted)}"
    which, remedy = _value_and_remedy(part, prediction, measured)
    source = "the machine file says" if prediction.from_machine else "the first steps measured"
    share = ""
    if part.part in ("computing", "loading"):
        whole = part.off / step.off
        share = (
            f"; that is {whole:.0%} of the step's error"
            if round(whole, 2) <= 1
            else "; other parts made up for some of it"
        )
    return f"{part.part} took {_longer(part)} than {source}: {which}; {remedy}{share}"


def summarize(prediction: SealedPrediction, measured: Measurement) -> str:
    """Return a line: the measured and the predicted step, and where they differ the reason, as far as it is known."""
    step = whole_step(prediction, measured)
    interval = f" ({ms(prediction.low)} - {ms(prediction.high)})" if prediction.high > prediction.low else ""
    line = f"measured {ms(step.measured)} a step, predicted {ms(step.predicted)}{interval}"
    if abs(step.off) <= LARGEST_ERROR * step.predicted:
        return line
    why = _use_of_cores(prediction, measured) or explain(prediction, measured)
    return f"{line}, {step.off / step.predicted:+.0%}: {why}"


def _use_of_cores(prediction: SealedPrediction, measured: Measurement) -> str:
    """Return what others took of the ranks' cores; empty where that was little."""
    return compare_use(None if prediction.from_machine else prediction.processor, measured.processor)


def _longer(part: PartError) -> str:
    if part.relative is None or abs(part.relative) >= 2:
        return f"{ms(abs(part.off))} {'longer' if part.off > 0 else 'less'}"
    return f"{abs(part.relative):.0%} {'longer' if part.off > 0 else 'less'}"


def _value_and_remedy(part: PartError, prediction: SealedPrediction, measured: Measurement) -> tuple[str, str]:
    """Return the value that was wrong, and a remedy."""
    again = "probe again" if prediction.from_machine else "run again on a machine that does nothing else"
    if sign := _use_of_cores(prediction, measured) or measured.disturbed:
        again = f"the machine was disturbed ({sign}): run again"
    high, low = ("high", "low") if part.off > 0 else ("low", "high")
    if part.part == "computing":
        unequal = measured.computing.median - measured.mean_computing
        if unequal >= max(EXPLAINS * part.off, (UNEQUAL - 1) * measured.mean_computing) and part.off > 0:
            ratio = measured.computing.median / measured.mean_computing
            return f"rank {measured.slowest} computes {ratio:.2f} times as long as the mean of ranks", "free its cores"
        return _named(prediction, f"node.flops is too {high} for these layers", "computing has changed since"), again
    if part.part == "loading":
        return "loading does not keep up with the steps", "give it more threads, or a faster disk"
    if part.part == "updates":
        which = f"node.memory_bandwidth is too {high}" if part.predicted else "the file has no node.memory_bandwidth"
        return _named(prediction, which, "updates have changed since"), again
    if part.part == "exchanges":
        return _named(prediction, _link(part, prediction, high, low), "exchanges have changed since"), again
    hid = "less" if part.off > 0 else "more"
    return f"exchanges and updates took about as long as predicted, but {hid} of them was hidden", _unhidden(part)


def _unhidden(part: PartError) -> str:
    return "leave them a core, or try another overlap" if part.off > 0 else "no value is wrong"


def _named(prediction: SealedPrediction, value: str, otherwise: str) -> str:
    return value if prediction.from_machine else otherwise


def _link(part: PartError, prediction: SealedPrediction, high: str, low: str) -> str:
    """Return the value of a link that was wrong: that of the larger share of the predicted exchanges."""
    if not part.predicted:
        return "the file gives exchanges between these ranks no time"
    links = prediction.program.nbytes * prediction.costs.per_byte / prediction.program.period
    return f"link.latency is too {low}" if links < part.predicted / 2 else f"link.bandwidth is too {high}"


def ms(seconds: float) -> str:
    """Return seconds as text, in milliseconds."""
    return f"{seconds * 1e3:,.3g} ms" if abs(seconds) < 0.1 else f"{seconds * 1e3:,.1f} ms"
