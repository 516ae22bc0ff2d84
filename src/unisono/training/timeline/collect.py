"""Collection of the spans of a run, on each rank by itself, and the file that all ranks write at its end.

    rank 0   spans, begins of steps with their prediction ┐
    rank 1   spans, begins of steps with their prediction ┼─ all_gather ─▶ trace events ─▶ FILE, by rank 0
    rank 2   ...                                          ┘

A span costs an entry in a list. Predicted steps are played when the file is written.
"""

from __future__ import annotations

import json
import time
from contextlib import AbstractContextManager
from pathlib import Path

from unisono.engine import OperationSpan, observed
from unisono.errors import UsageError
from unisono.plan.choose import Candidate
from unisono.step.predict import steady_step
from unisono.training.timeline.lanes import TimelineSpan, timeline_span
from unisono.training.timeline.predicted import PredictedStep, lay, spans_of
from unisono.training.timeline.trace_events import document
from unisono.world import World


class Timeline:
    """Collects the spans of one rank. All ranks of `world` make one together: clocks begin after a common barrier."""

    def __init__(self, world: World) -> None:
        self._world = world
        world.barrier()
        self._zero = time.perf_counter()
        self._spans: list[OperationSpan] = []
        self._steps: list[tuple[float, Candidate]] = []

    def add(self, span: OperationSpan) -> None:
        """Add a span."""
        self._spans.append(span)

    def span(self, name: str, kind: str) -> AbstractContextManager[None]:
        """Record the block as a span of this thread."""
        return observed(self.add, name, kind)

    def begin_step(self, begin: float, chosen: Candidate) -> None:
        """Add a step that began at `begin`, by `time.perf_counter`, and whose setting was predicted as `chosen`."""
        self._steps.append((begin, chosen))

    def write(self, path: Path) -> None:
        """Write the spans of all ranks. Called by all ranks together; rank 0 writes."""
        mine = [*(timeline_span(span, self._zero) for span in self._spans), *self._predicted()]
        everyone = self._world.all_gather_object(mine)
        self._world.call_on_root(lambda: path.write_text(json.dumps(document(everyone))))

    def _predicted(self) -> list[TimelineSpan]:
        """Return the predicted spans of the steps that have a prediction."""
        settings = {id(chosen): chosen for _, chosen in self._steps}  # a few, each of many steps
        played = {key: spans_of(steady_step(chosen.rule, chosen.costs)) for key, chosen in settings.items()}
        return lay([PredictedStep(begin - self._zero, played[id(chosen)]) for begin, chosen in self._steps])


def check_writable(path: Path) -> None:
    """Raise UsageError when a timeline cannot be written there, so that this is known before the run."""
    try:
        path.open("a").close()
    except OSError as error:
        raise UsageError(f"cannot write the timeline {path}: {error.strerror}") from error
