"""Predictions of a run's step, ready to be sealed: from a machine file, or from measurements of the first steps.

    machine file ─ predict_run ─▶ computing, communication, update, interval ─┐
    first steps ─ the search's choice, and that without exchanges ─────────┴─▶ SealedPrediction

    computing                      update                        communication
    │ forward and backward │ what a step without exchanges adds │ the rest of the predicted step │

Worked example, 4 ranks: computing 40 ms; the program takes 42 ms where collectives take no time, and 52 ms with them:
updates that do not hide are 2 ms, communication that does not hide is 10 ms.

**Interval.** With a machine file it is that of a plan (`plan/run_row.py`), without one that of the trials
(`plan/trials.py`).
"""

from __future__ import annotations

import datetime
import hashlib
from dataclasses import replace
from importlib.metadata import version

from unisono.foresight.seal import BEFORE, CostFacts, ProgramFacts, RunFacts, SealedPrediction
from unisono.plan.choose import Candidate, StepParts, parts_of
from unisono.plan.exchange_cost import FREE
from unisono.plan.planned_run import PlannedRun
from unisono.plan.run_plan import predict_run
from unisono.plan.run_row import INTERVAL_SHARE
from unisono.plan.trials import TrialChoice
from unisono.step.predict import predict
from unisono.step.program import UPDATE, Role, Step, StepProgram


def planned_prediction(run: PlannedRun, facts: RunFacts) -> SealedPrediction:
    """Return the prediction of a run whose layers are whole, as `unisono plan` makes it.

    Raises UsageError as `predict_run`.
    """
    row, _, played = predict_run(run)
    parts = StepParts(row.computing, row.communication, row.update, row.loading)
    found = _prediction(BEFORE, facts, played, parts, (row.low, row.high, INTERVAL_SHARE))
    return replace(found, program=replace(found.program, schedule=row.schedule))


def tuned_prediction(choice: TrialChoice, facts: RunFacts, steps: int) -> SealedPrediction:
    """Return the prediction that a search of `steps` steps has made for the setting it chose, from its measurements."""
    chosen, costs = choice.candidate, choice.candidate.costs
    silent = predict(chosen.rule, replace(costs, collective=FREE)).step
    parts = parts_of(costs.computing.whole, silent, chosen.prediction.step)
    interval = choice.interval(parts.computing + parts.update)
    found = _prediction(f"after {steps} tuning steps", facts, chosen, parts, interval)
    return replace(found, doubt=choice.doubt, processor=choice.use)


def _prediction(
    sealed: str, facts: RunFacts, chosen: Candidate, parts: StepParts, interval: tuple[float, float, float]
) -> SealedPrediction:
    """Return the prediction of a step that was played; `interval` has both ends and the nominal share."""
    program, updating = program_of(chosen)
    return SealedPrediction(
        sealed,
        version("unisono"),
        facts,
        parts,
        *interval,
        program,
        CostFacts(*chosen.costs.collective, chosen.costs.computing.update),
        chosen.prediction.communicating,
        updating,
        datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    )


def program_of(chosen: Candidate) -> tuple[ProgramFacts, float]:
    """Return the program of a predicted step, and the seconds of a step in which it updates weights."""
    setting, rule, costs = chosen.setting, chosen.rule, chosen.costs
    buckets, period = costs.layout.buckets, rule.traits.period
    tasks = tuple(task for number in range(period) for task in rule(Step(number), 0, costs.layout))
    updates = (one for one in tasks if one.lane == UPDATE and one.parameters and one.operation.role is Role.LOCAL)
    facts = ProgramFacts(
        setting.overlap,
        setting.bucket_bytes,
        len(buckets),
        sum(one.nbytes for one in buckets),
        wire=rule.exchange.wire or "",
        period=period,
        digest=digest_of(tasks),
    )
    return facts, sum(one.operation.price(one, costs).seconds for one in updates) / period


def digest_of(tasks: StepProgram) -> str:
    """Return the SHA-256 of tasks: equal programs have equal ones, in every process."""
    lines = (
        f"{task} {task.lane} {task.reads} {task.writes} {task.group} {task.parameters} {task.peer}" for task in tasks
    )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
