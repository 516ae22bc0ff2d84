"""Foresight of a run: its prediction is sealed before it is measured, and both go into the ledger.

    --machine:    plan ─▶ RUN/prediction.json ─ first step ─ ... ─ last step ─▶ RUN/measurement.json ─▶ ledger.jsonl
    without:      first step ─ ... the search ends ─▶ RUN/prediction.json ─ ... ─ last step ─▶ the same

The prediction of a machine file is that of `unisono plan` for this recipe, these ranks and nodes, with its interval.
Without one it is that of the search for overlap and buckets (`reducer/tuning.py`), with the interval of its trials
(`plan/trials.py`). A run that has neither has no seal, and says why.

    computing                      update                        communication
    │ forward and backward │ what a step without exchanges adds │ the rest of the predicted step │

Worked example, 4 ranks: computing 40 ms; the program takes 42 ms where collectives take no time, and 52 ms with them:
updates that do not hide are 2 ms, communication that does not hide is 10 ms.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import TYPE_CHECKING

import numpy as np

from unisono.data.order import steps_of
from unisono.errors import UsageError
from unisono.foresight.compare import explain, step_words, summarize
from unisono.foresight.ledger import LEDGER, NO_MEASUREMENT, LedgerEntry, append
from unisono.foresight.seal import (
    BEFORE,
    MEASUREMENT,
    WARMUP_STEPS,
    CostFacts,
    ProgramFacts,
    RunFacts,
    Seal,
    SealedPrediction,
    Seconds,
    measure,
    read_seal,
    seals_of,
    write_seal,
)
from unisono.plan.choose import Candidate, StepParts, is_searched, parts_of
from unisono.plan.machines import find_machine, machine_file
from unisono.plan.planned_run import PlannedRun
from unisono.plan.run_plan import INTERVAL_SHARE, predict_run
from unisono.plan.trials import TrialChoice
from unisono.processor import HOST, Counters, ProcessorUse, processor_use, read_counters, use_since
from unisono.step.predict import predict
from unisono.step.program import Step
from unisono.tables import as_json
from unisono.training.chain import recipe_digest
from unisono.training.recipe_plan import SampleRecipe, run_on_ranks
from unisono.training.run_directory import LOG, replace_file
from unisono.training.trainer import KINDS, SEQUENTIAL_KINDS, Trainer

if TYPE_CHECKING:
    from unisono.training.run import Run

MAX_NUMBERS_KEPT = 1 << 24
"""Largest number of times of steps that are kept for the measurement, over all ranks and kinds: the newest stay."""

WITHOUT_TIME = re.compile(
    r"name|ranks|training\.(?!virtual_ranks).*|optimizer\.(learning_rate|for_batch|warm_epochs|policy|every|decay|power)"
)
"""Keys of a recipe that change no step's time, or that a seal names by themselves."""


@dataclass
class RunForesight:
    """Seal and measurement of a run. All ranks call its functions together; rank 0 writes."""

    run: Run
    begun: int = 0
    """Steps of a resumed run before it began."""
    _seal: Seal | None = None
    _pending: bool = True  # whether a search may still end and give a prediction
    _made: int = 0  # steps since then
    _searched: int = 0  # those before the search ended
    _dropped: int = 0
    _all_steps: float = 0.0
    _kept: list[Seconds] = field(default_factory=list)
    _counters: Counters = field(default_factory=read_counters)  # when the run began, or the search ended

    def begin(self) -> None:
        """Seal the prediction of the run's machine before the first step. Raises UsageError for an unknown machine, and
        where the seal cannot be written."""
        if (machine := self.run.options.machine) is not None:
            self._adopt(self.run.world.call_on_root(lambda: self._planned(machine)), self.run.display.log)
        elif self.begun:
            self._adopt(self.run.world.call_on_root(self._of_before), self.run.display.detail)
        self._seal_search()

    def after_step(self) -> None:
        """Seal the prediction of the search once it has ended."""
        self._made += 1
        self._seal_search()

    def add_steps(self, seconds: Seconds) -> None:
        """Add the times of steps of all ranks, on rank 0."""
        self._kept.append(seconds)
        sequential = seconds[..., [KINDS.index(kind) for kind in SEQUENTIAL_KINDS]]
        self._all_steps += float(sequential.sum(dtype=np.float64)) / self.run.world.size
        while len(self._kept) > 1 and sum(times.size for times in self._kept) > MAX_NUMBERS_KEPT:
            self._dropped += self._kept.pop(0).shape[1]

    def finish(self, wall: float) -> None:
        """Write the measurement and add the run to the ledger; `wall` is the seconds since the run began."""
        uses = self.run.world.all_gather_object(use_since(self._counters))
        if self.run.world.rank == 0:
            try:
                self._write(wall, processor_use(uses))
            except UsageError as error:  # the run itself has ended well
                self.run.display.log(f"not in the ledger: {error}")

    def _seal_search(self) -> None:
        reducer = self.run.trainer.reducer
        if not self._pending or not reducer.programs.tuning.finished:
            return
        self._pending = False
        self._searched, self._counters = max(0, self._made - 1), read_counters()
        choice = reducer.programs.tuning.choice
        if choice is not None:
            self.run.display.log(
                f"the first {self._searched} steps tuned how gradients are averaged: overlap "
                f"{choice.candidate.setting.overlap} (more: {self.run.home / LOG})"
                + (choice.doubt and f"; {choice.doubt}")
            )
        if self._seal is not None:
            return
        if choice is None:
            self.run.display.detail(f"no prediction is sealed: {reason_without_seal(self.run.trainer)}; give --machine")
            return
        self.run.trainer.wait()
        sealed = tuned_prediction(choice, self._facts(), self._searched)
        self._adopt(self.run.world.call_on_root(lambda: write_seal(self.run.home, sealed)), self.run.display.detail)

    def _adopt(self, seal: Seal | str | None, log: Callable[[str], None]) -> None:
        """Adopt a seal and report it with `log`, or the reason for which there is none."""
        if isinstance(seal, Seal):
            self._seal, prediction = seal, seal.prediction
            log(f"prediction sealed {prediction.sealed}: a step of {step_words(prediction)}, in {seal.path}")
        elif seal is not None:
            log(f"no prediction is sealed before the first step: {seal}")

    def _planned(self, machine: str) -> Seal | str:
        """Seal the prediction of a machine file. Return it, or the reason for which it cannot be predicted."""
        described = find_machine(machine)
        device = self.run.trainer.device
        if (device.type == HOST) == (described.node.accelerators > 0):
            return f"the run computes on {device}, and {described.name} has {described.node.accelerators} accelerators"
        digest = hashlib.sha256(machine_file(machine).read_bytes()).hexdigest()
        facts = replace(self._facts(), machine=described.name, machine_digest=digest)
        feed = self.run.feed
        samples = SampleRecipe("x".join(map(str, feed.blank(1).shape[1:])), feed.classes, feed.samples)
        try:
            planned = run_on_ranks(self.run.recipe, samples, described, self.run.world.placement)
            sealed = planned_prediction(planned, facts)
        except UsageError as error:
            return str(error)
        for note in planned.notes:
            self.run.display.log(note)
        return write_seal(self.run.home, sealed)

    def _of_before(self) -> Seal | None:
        """Return the newest seal of a resumed run where it still holds."""
        seals = seals_of(self.run.home)
        if not seals:
            return None
        seal = read_seal(seals[-1])
        return seal if holds(seal.prediction, self._facts()) else None

    def _facts(self) -> RunFacts:
        training, world = self.run.recipe.training, self.run.world
        steps = training.epochs * steps_of(self.run.feed.samples, training.batch) - self.begun - self._made
        names = self.run.recipe.name, self.run.recipe.model.name, self.run.recipe.rule.name
        settings = recipe_digest(self.run.recipe, WITHOUT_TIME)
        return RunFacts(*names, world.size, world.nodes, training.batch, steps, settings=settings)

    def _write(self, wall: float, use: ProcessorUse) -> None:
        """Write the measurement, if there is one, and add a run with a seal to the ledger."""
        home, display, seal = self.run.home, self.run.display, self._seal
        if self._pending:
            why = f"the run ended after {self._made} steps, while settings were still tried"
            if seal is not None:
                display.log(f"{NO_MEASUREMENT}{why}; train longer")
                return
            display.log(f"no prediction is sealed, which is no error: {why}; train longer, or with --machine")
        skip, period = self._searched + WARMUP_STEPS, self.run.trainer.reducer.rule.traits.period
        steps = np.concatenate(self._kept or [np.empty((1, 0, len(KINDS)), np.float32)], axis=1)
        measurement = measure(steps, KINDS, max(0, skip - self._dropped), period)
        if measurement is None:
            display.detail(f"{NO_MEASUREMENT}{reason_without_measurement(period, skip)}")
            return
        if seal is not None and (kept := self._kept_instead(seal.prediction)):
            display.log(f"the sealed prediction is not compared: as the run went on, {kept} was faster, and is kept")
            seal = None
        digest = "" if seal is None else seal.digest
        totals = {"all_steps": self._all_steps, "timed": self._dropped + steps.shape[1], "wall": wall}
        measured = replace(measurement, skipped=skip, **totals, seal=digest, processor=use)
        if seal is None:
            replace_file(home / f"{MEASUREMENT}.json", as_json(measured))
            return
        replace_file(seal.measurement, as_json(measured, explanation=explain(seal.prediction, measured)))
        ledger = self.run.options.ledger or home.resolve().parent / LEDGER
        name = os.path.relpath(seal.path.resolve(), ledger.parent.resolve())
        append(ledger, LedgerEntry(seal.prediction, measured, version("unisono"), run=name, digest=seal.digest))
        display.log(f"{summarize(seal.prediction, measured)}; by part: unisono plan --check {home}")

    def _kept_instead(self, sealed: SealedPrediction) -> str:
        """Return the setting, in words, that is kept in place of the one that a search has predicted; "" for none."""
        kept, program = self.run.trainer.reducer.programs.tuning.kept, sealed.program
        same = (kept.overlap, kept.bucket_bytes) == (program.overlap, program.bucket_bytes)
        return "" if sealed.from_machine or same else f"overlap {kept.overlap}, buckets of {kept.bucket_bytes} bytes"


def holds(sealed: SealedPrediction, facts: RunFacts) -> bool:
    """Return True where a prediction is that of the same steps: batch, ranks, nodes and settings are equal."""
    before = sealed.run
    keys = ("batch", "ranks", "nodes", "settings") if before.settings else ("batch", "ranks", "nodes", "model", "rule")
    return all(getattr(before, key) == getattr(facts, key) for key in keys)  # older seals have no settings


def reason_without_measurement(period: int, skip: int) -> str:
    """Return the reason for which a run has no measurement: no whole period is left after the skipped steps."""
    return f"the run has no {'step' if period == 1 else f'{period} steps'} after the first {skip} steps"


def reason_without_seal(trainer: Trainer) -> str:
    """Return the reason for which a run's first steps gave no prediction."""
    if trainer.world.size == 1:
        return "one rank measures no exchange"
    if not is_searched(trainer.reducer.rule):
        return f"the steps of {type(trainer.reducer.rule).__name__} are not alike, so they are not measured"
    return "overlap and buckets were not searched"


def planned_prediction(run: PlannedRun, facts: RunFacts) -> SealedPrediction:
    """Return the prediction of a run whose layers are whole, as `unisono plan` makes it. Raises UsageError as
    `predict_run`."""
    row, _, played = predict_run(run)
    parts = StepParts(row.computing, row.communication, row.update, row.loading)
    prediction = _prediction(BEFORE, facts, played, parts, (row.low, row.high, INTERVAL_SHARE))
    return replace(prediction, program=replace(prediction.program, schedule=row.schedule))


def tuned_prediction(choice: TrialChoice, facts: RunFacts, steps: int) -> SealedPrediction:
    """Return the prediction that a search of `steps` steps has made for the setting it chose, from its measurements."""
    chosen, costs = choice.candidate, choice.candidate.costs
    silent = predict(chosen.rule, costs.without_exchanges()).step
    parts = parts_of(costs.computing.whole, silent, chosen.prediction.step)
    interval = choice.interval(parts.computing + parts.update)
    prediction = _prediction(f"after {steps} tuning steps", facts, chosen, parts, interval)
    return replace(prediction, doubt=choice.doubt, processor=choice.use)


def _prediction(
    sealed: str, facts: RunFacts, chosen: Candidate, parts: StepParts, interval: tuple[float, float, float]
) -> SealedPrediction:
    """Return the prediction of a step that was played; `interval` has both ends and the nominal share."""
    program, updating = program_of(chosen)
    costs = CostFacts(*chosen.costs.collective, chosen.costs.computing.update)
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    communicating = chosen.prediction.communicating
    named = version("unisono"), facts, parts, *interval
    return SealedPrediction(sealed, *named, program, costs, communicating, updating, now)


def program_of(chosen: Candidate) -> tuple[ProgramFacts, float]:
    """Return the program of a predicted step, and the seconds of a step in which it updates weights.

    Its digest is the SHA-256 of its tasks: equal programs have equal ones, in every process.
    """
    setting, rule, costs = chosen.setting, chosen.rule, chosen.costs
    buckets, period = costs.layout.buckets, rule.traits.period
    tasks = [task for step in range(period) for task in rule(Step(step), 0, costs.layout)]
    updates = [task for task in tasks if task.operation.name == "update"]
    lines = [
        f"{task} {task.lane} {task.reads} {task.writes} {task.group} {task.parameters} {task.peer}" for task in tasks
    ]
    facts = ProgramFacts(
        setting.overlap,
        setting.bucket_bytes,
        len(buckets),
        sum(bucket.nbytes for bucket in buckets),
        wire=rule.exchange.wire or "",
        period=period,
        digest=hashlib.sha256("\n".join(lines).encode()).hexdigest(),
    )
    return facts, sum(task.operation.price(task, costs).seconds for task in updates) / period
