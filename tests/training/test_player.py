"""Events of a run in a fixed order, from its recipe and the requests that come with its steps."""

from __future__ import annotations

from collections.abc import Mapping

from unisono.training.player import CopyState, Draw, Event, Save, Stop, TrainStep, fixed_order
from unisono.training.recipe import OptimizerRecipe, Recipe, TrainingRecipe
from unisono.training.state import RunPoint
from unisono.training.trainer import seed_of_step

SAMPLES, BATCH = 10, 4
"""Three steps an epoch."""


def recipe(epochs: int = 2, every: int = 0) -> Recipe:
    optimizer = OptimizerRecipe(learning_rate=0.5)
    return Recipe(optimizer=optimizer, training=TrainingRecipe(epochs, BATCH, seed=7, checkpoint_every=every))


NEW = RunPoint()


def events(
    of: Recipe, begin: RunPoint = NEW, asked: Mapping[int, dict[str, str]] | None = None, stops_after: int = 0
) -> list[Event]:
    """Return the events of a run, with the requests that come with some steps, and SIGTERM behind an epoch."""
    step, epochs, played = begin.step, begin.epoch, list[Event]()

    def requests() -> Mapping[str, str]:
        return (asked or {}).get(step, {})

    def stopping() -> str:
        return "rank 1" if epochs == stops_after else ""

    for event in fixed_order(of, SAMPLES, 1, begin, requests, stopping):
        step += isinstance(event, TrainStep)
        epochs += isinstance(event, Save) and event.tests
        played.append(event)
    return played


def names(played: list[Event]) -> str:
    return " ".join(type(event).__name__.removeprefix("Train") for event in played)


def test_epochs_are_drawn_made_and_saved() -> None:
    played = events(recipe())
    assert names(played) == "Draw Step Step Step Save Draw Step Step Step Save"
    assert played[:2] == [Draw(0, 0), TrainStep(0, 0, 0.5, seed_of_step(7, 0, 1))]
    assert played[7] == TrainStep(4, 1, 0.5, seed_of_step(7, 4, 1))
    assert [event for event in played if isinstance(event, Save)] == [
        Save(RunPoint(1, 0, 3), tests=True),
        Save(RunPoint(2, 0, 6), tests=True),
    ]


def test_a_resumed_run_has_the_events_that_were_left() -> None:
    full = events(recipe())
    rest = events(recipe(), RunPoint(1, 1, 4))
    assert rest == [Draw(1, 1), *full[full.index(Draw(1, 0)) + 2 :]]
    assert names(events(recipe(), RunPoint(0, 3, 3))) == "Draw Save Draw Step Step Step Save"
    assert events(recipe(), RunPoint(2, 0, 6)) == []


def test_checkpoints_within_an_epoch_are_those_due_and_those_requested() -> None:
    assert names(events(recipe(1, every=2))) == "Draw Step Step Save Step Save"
    played = events(recipe(1), asked={1: {"save": "2 ranks"}, 3: {"save": "rank 0"}})
    assert names(played) == "Draw Step Save Step Step Save", "the end of the epoch saves anyway"
    assert played[2] == Save(RunPoint(0, 1, 1), why="SIGUSR1 to 2 ranks")


def test_copies_in_memory_are_made_where_nothing_is_saved() -> None:
    played = events(recipe(1, every=2), asked={step: {"copy": "rank 0"} for step in (1, 2, 3)})
    assert names(played) == "Draw Step CopyState Step Save Step Save"
    assert played[2] == CopyState(RunPoint(0, 1, 1))


def test_a_stop_saves_the_step_and_ends_the_run() -> None:
    played = events(recipe(), asked={3: {"stop": "rank 2"}})
    assert played[-2:] == [Save(RunPoint(0, 3, 3)), Stop("SIGTERM to rank 2")]
    late = events(recipe(), stops_after=1)
    assert late[-2:] == [Save(RunPoint(1, 0, 3), tests=True), Stop("SIGTERM to rank 1")]
    assert not isinstance(events(recipe(), stops_after=2)[-1], Stop), "after the last epoch there is nothing to stop"
