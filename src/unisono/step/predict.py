"""Prediction of a step once steps follow one another: the rule's own programs on a clock with measured costs.

main            ──backward──────────▶│    waits for w0   │──forward──▶
communication        │ allreduce 1 │ allreduce 2 │ allreduce 3 │
update                            │ update 1 │ update 2 ...

A device copies to the host and from it on a stream each. There these copies have lanes of their own:

main            ──backward──────────▶│
to_host            │ pack 1 │ pack 2 │ pack 3 │
communication               │ allreduce 1 │ allreduce 2 │ allreduce 3 │
to_device                                 │ set_grads 1 │ set_grads 2 │ set_grads 3 │
"""

from __future__ import annotations

from collections.abc import Mapping

from unisono.step import operations as op
from unisono.step.clock import TaskSpan, play_on_clock
from unisono.step.costs import Costs, Prediction
from unisono.step.program import Price, Role, Step, StepProgram
from unisono.step.rule import BaseRule

STREAMS: Mapping[Price, str] = {op.price_pack: "to_host", op.price_unpack: "to_device"}
"""Lanes of copies between a device and the host, by the price of the operation."""

WARMUP_STEPS = 4
"""Smallest number of steps that are played before measuring: in the first, nothing is pending."""


def predict(rule: BaseRule, costs: Costs) -> Prediction:
    """Return the predicted times of a step, as the mean over one period of the rule. All ranks are assumed alike."""
    programs, spans = _play(rule, costs)
    period, warmup = len(programs), _warmup(len(programs))
    begins = sorted(span.begin for span in spans if span.task.operation is op.BEGIN)
    step = (begins[warmup + period] - begins[warmup]) / period
    tasks = (task for program in programs for task in program)
    sends = (task for task in tasks if task.operation.role is not Role.LOCAL and task.operation is not op.BARRIER)
    communicating = sum(task.operation.price(task, costs).seconds for task in sends) / period
    return Prediction(step, communicating, step - costs.computing.whole)


def steady_step(rule: BaseRule, costs: Costs) -> list[TaskSpan]:
    """Return the spans of the tasks of one step, in seconds since it began, in the order in which they end.

    The step is the first of a period, once steps follow one another. Tasks may end after the next step has begun.
    """
    programs, spans = _play(rule, costs)
    first = sum(len(programs[step % len(programs)]) for step in range(_warmup(len(programs))))
    own = [span for span in spans if first <= span.number < first + len(programs[0])]
    began = next(span.begin for span in own if span.task.operation is op.BEGIN)
    return [span._replace(number=span.number - first, begin=span.begin - began, end=span.end - began) for span in own]


def _warmup(period: int) -> int:
    """Return the number of steps before those that are measured: whole periods."""
    return max(WARMUP_STEPS - period, -(-WARMUP_STEPS // period) * period if period > 1 else 0)


def _play(rule: BaseRule, costs: Costs) -> tuple[list[StepProgram], list[TaskSpan]]:
    """Return the programs of a period, and the spans of the warm-up, of a period, and of the first step after it."""
    period = rule.traits.period
    programs = [on_streams(rule(Step(step), 0, costs.layout), costs) for step in range(period)]
    played = tuple(task for step in range(_warmup(period) + period + 1) for task in programs[step % period])
    return programs, play_on_clock({0: played}, {**rule.threads(), **dict.fromkeys(STREAMS.values(), 1)}, costs)


def on_streams(program: StepProgram, costs: Costs) -> StepProgram:
    """Return the program with copies between a device and the host on the lanes of their streams, where it has any."""
    if not costs.computing.streams:
        return program
    return tuple(task._replace(lane=STREAMS.get(task.operation.price, task.lane)) for task in program)
