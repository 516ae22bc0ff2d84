"""Prediction of a step's time once steps follow one another: the rule's own programs on a clock with measured costs.

main            ──backward──────────▶│    waits for w0   │──forward──▶
communication        │ allreduce 1 │ allreduce 2 │ allreduce 3 │
update                            │ update 1 │ update 2 ...
"""

from __future__ import annotations

from unisono.step import operations as op
from unisono.step.clock import play_on_clock
from unisono.step.costs import Costs, Prediction
from unisono.step.program import Role, Step
from unisono.step.rule import Rule

WARMUP_STEPS = 4
"""Smallest number of steps that are played before measuring: in the first, nothing is pending."""


def predict(rule: Rule, costs: Costs) -> Prediction:
    """Return the predicted times of a step, as the mean over one period of the rule. All ranks are assumed alike."""
    period = rule.period
    warmup = max(WARMUP_STEPS - period, -(-WARMUP_STEPS // period) * period if period > 1 else 0)
    played = warmup + period
    programs = [rule(Step(number), 0, costs.layout) for number in range(period)]
    whole = tuple(task for number in range(played + 1) for task in programs[number % period])
    spans = play_on_clock({0: whole}, rule.threads(), costs)
    begins = sorted(span.begin for span in spans if span.task.operation is op.BEGIN)
    step = (begins[played] - begins[warmup]) / period
    tasks = (task for program in programs for task in program)
    sends = (task for task in tasks if task.operation.role is not Role.LOCAL and task.operation is not op.BARRIER)
    communicating = sum(task.operation.price(task, costs).seconds for task in sends) / period
    return Prediction(step, communicating, step - costs.computing.whole)
