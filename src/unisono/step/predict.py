"""Prediction of a step once steps follow one another: the rule's own programs on a clock with measured costs.

main            ──backward──────────▶│    waits for w0   │──forward──▶
communication        │ allreduce 1 │ allreduce 2 │ allreduce 3 │
update                            │ update 1 │ update 2 ...
"""

from __future__ import annotations

from collections.abc import Sequence

from unisono.step import operations as op
from unisono.step.clock import TaskSpan, play_on_clock
from unisono.step.costs import Costs, Prediction
from unisono.step.program import Role, Step, StepProgram
from unisono.step.rule import BaseRule

WARMUP_STEPS = 4
"""Smallest number of steps that are played before measuring: in the first, nothing is pending."""


def predict(rule: BaseRule, costs: Costs) -> Prediction:
    """Return the predicted times of a step, as the mean over one period of the rule. All ranks are assumed alike."""
    programs = _programs(rule, costs)
    period = len(programs)
    warmup, played = _warmup(period), _warmup(period) + period
    begins = sorted(span.begin for span in _play(rule, programs, costs) if span.task.operation is op.BEGIN)
    step = (begins[played] - begins[warmup]) / period
    tasks = (task for program in programs for task in program)
    sends = (task for task in tasks if task.operation.role is not Role.LOCAL and task.operation is not op.BARRIER)
    communicating = sum(task.operation.price(task, costs).seconds for task in sends) / period
    return Prediction(step, communicating, step - costs.computing.whole)


def steady_step(rule: BaseRule, costs: Costs) -> list[TaskSpan]:
    """Return the spans of the tasks of one step, in seconds since it began, in the order in which they end.

    The step is the first of a period, once steps follow one another. Tasks may end after the next step has begun.
    """
    programs = _programs(rule, costs)
    first = sum(len(programs[number % len(programs)]) for number in range(_warmup(len(programs))))
    own = range(first, first + len(programs[0]))
    spans = [span for span in _play(rule, programs, costs) if span.number in own]
    began = next(span.begin for span in spans if span.task.operation is op.BEGIN)
    return [one._replace(number=one.number - first, begin=one.begin - began, end=one.end - began) for one in spans]


def _programs(rule: BaseRule, costs: Costs) -> list[StepProgram]:
    """Return the programs of a period."""
    return [rule(Step(number), 0, costs.layout) for number in range(rule.traits.period)]


def _warmup(period: int) -> int:
    """Return the number of steps before those that are measured: whole periods."""
    return max(WARMUP_STEPS - period, -(-WARMUP_STEPS // period) * period if period > 1 else 0)


def _play(rule: BaseRule, programs: Sequence[StepProgram], costs: Costs) -> list[TaskSpan]:
    """Return the spans of the warm-up, of a period, and of the first step after it."""
    period = len(programs)
    steps = _warmup(period) + period + 1
    whole = tuple(task for number in range(steps) for task in programs[number % period])
    return play_on_clock({0: whole}, rule.threads(), costs)
