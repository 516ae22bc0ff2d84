"""State of an asynchronous run: the cut that it resumes from, what it removes, and where servers and workers begin."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.asynchronous.decisions import resized, resumed_states
from unisono.asynchronous.event_log import EventLog, logged_servers, read_order
from unisono.asynchronous.messages import Order, Reply, WorkerProgress
from unisono.errors import CheckpointError, RecipeError
from unisono.rules import EASGD
from unisono.step.rule import SeatCounts
from unisono.training import run_directory
from unisono.training.checkpoint.files import save
from unisono.training.checkpoint.layout import Checkpoint, checkpoint_names
from unisono.training.cut import (
    WorkerCounters,
    begin_resumed,
    centre_checkpoint,
    cuts_to_try,
    dead_before,
    discard_after,
    load_cut,
    worker_folder,
)
from unisono.training.recipe import Recipe, TrainingRecipe


def snapshot(home: Path, worker: int, cut: int) -> None:
    save(worker_folder(home, worker), Checkpoint(cut, {"w": torch.zeros(1)}, {}, {}))


def snapshots(home: Path, workers: int) -> list[list[str]]:
    return [checkpoint_names(worker_folder(home, worker)) for worker in range(workers)]


def test_what_is_newer_than_the_cut_is_removed(tmp_path: Path) -> None:
    """A second death may leave a new centre 40 beside worker 1's snapshot 40 of before, if that stays."""
    for worker, cuts in enumerate([(20, 30), (20, 30, 40)]):
        for cut in cuts:
            snapshot(tmp_path, worker, cut)
    for epoch, step in enumerate((20, 30, 40)):
        run_directory.add_metrics(tmp_path, {"epoch": epoch + 1, "step": step})
    log = EventLog(tmp_path, 0)
    for exchange in range(5):
        log.add(number=exchange, worker=exchange % 2)
    log.close()
    discard_after(tmp_path, 30, [3])
    assert snapshots(tmp_path, 2) == [["step-000000020", "step-000000030"]] * 2
    assert [line["step"] for line in run_directory.read_metrics(tmp_path)] == [20]  # the epoch of 30 ends again
    assert read_order(tmp_path, 0) == [0, 1, 0]


def test_a_run_that_begins_again_has_no_snapshots(tmp_path: Path) -> None:
    for worker in range(12):  # worker-10 too
        snapshot(tmp_path, worker, 0)
    discard_after(tmp_path, -1, [0])
    assert snapshots(tmp_path, 12) == [[]] * 12


FIRST = Reply(7, 700, 600, workers=(WorkerProgress(4, 6), WorkerProgress(3, 5)))
SECOND = Reply(6, workers=(WorkerProgress(3, 4), WorkerProgress(3, 5)))
"""Replies of two servers to one exchange of worker 0. The second one has not served another exchange of it yet."""


def test_each_server_resumes_with_its_own_numbers(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints", centre_checkpoint(8, {"w": torch.zeros(1)}, [FIRST, SECOND], "digits"))
    loaded = load_cut(tmp_path)
    assert loaded is not None and loaded.seats == SeatCounts(2, 2)
    states = resumed_states(loaded.replies)
    assert [state.exchanges for state in states] == [7, 6]
    assert [state.workers for state in states] == [FIRST.workers, SECOND.workers]
    assert [state.samples for state in states] == [600, 600]


def test_centres_and_snapshots_of_older_releases_open(tmp_path: Path) -> None:
    """One server has served 3 exchanges of two workers, of 7 and 6 steps."""
    numbers = [3, 52, 48, 3, 1, 0, 2.5, 12, 13, 4.0, 1.5, 0.1, 0.2, 0.3, 0.4, 0.5, 7, 1, 6, 2]
    progress = {"epoch": 1, "data": "digits", "seconds": 4.0, "servers": [[float(number) for number in numbers]]}
    save(tmp_path / "checkpoints", Checkpoint(13, {"w": torch.ones(1)}, {}, progress))
    loaded = load_cut(tmp_path, SeatCounts(2, 1))
    assert loaded is not None and loaded.seats == SeatCounts(2, 1)
    assert [worker.step for worker in loaded.replies[0].workers] == [7, 6]
    (state,) = resumed_states(loaded.replies)
    assert (state.exchanges, state.samples, state.epoch, state.epoch_began) == (3, 48, 1, 2.5)
    old = WorkerCounters(**{"step": 7, "samples": 4, "loss": 1.5, "known": 48})
    assert old == WorkerCounters(7, 4, 1.5, 48)


def test_logs_are_cut_where_each_server_resumes(tmp_path: Path) -> None:
    """Server 2 was there before the run had two servers."""
    for server in range(3):
        log = EventLog(tmp_path, server)
        for exchange in range(9):
            log.add(number=exchange, worker=exchange % 2)
        log.close()
    discard_after(tmp_path, 8, (7, 6))
    assert [len(read_order(tmp_path, server)) for server in range(2)] == [7, 6]
    assert logged_servers(tmp_path) == [0, 1]


def test_a_new_server_begins_with_0() -> None:
    states = resumed_states([FIRST, SECOND])
    assert [state.exchanges for state in resized(states, 2, 3)] == [7, 6, 0]
    assert [state.exchanges for state in resized(states, 5, 1)] == [7]


def centre(home: Path, cut: int, exchange: int, orders: Order = Order.SAVE | Order.CENTRE) -> None:
    reply = Reply(exchange, orders=orders, workers=(WorkerProgress(4, 6), WorkerProgress(3, 5)))
    save(home / "checkpoints", centre_checkpoint(cut, {"w": torch.zeros(1)}, [reply], "digits"))


def test_the_newest_centre_with_all_snapshots_is_used(tmp_path: Path) -> None:
    """Worker 1 has not come since the cut 20. 30 and 35 would let it begin without state of its optimizer."""
    for cut, exchange in ((20, 10), (30, 15), (35, 18)):
        centre(tmp_path, cut, exchange)
        snapshot(tmp_path, 0, cut)
    snapshot(tmp_path, 1, 20)
    loaded = load_cut(tmp_path, SeatCounts(2, 1))
    assert loaded is not None and (loaded.centre.step, loaded.replies[0].exchanges) == (20, 10)
    newest = load_cut(tmp_path)
    assert newest is not None and newest.centre.step == 35
    for others in (SeatCounts(3, 1), SeatCounts(2, 2)):  # they use no snapshots
        loaded = load_cut(tmp_path, others)
        assert loaded is not None and loaded.centre.step == 35
    (line,) = discard_after(tmp_path, 20, [10])
    assert "step-000000030, step-000000035: removed" in line
    assert checkpoint_names(tmp_path / "checkpoints") == ["step-000000020"]
    assert snapshots(tmp_path, 2) == [["step-000000020"]] * 2


def test_a_worker_that_had_died_before_is_not_waited_for(tmp_path: Path) -> None:
    for cut, exchange in ((20, 10), (30, 15)):
        centre(tmp_path, cut, exchange)
        snapshot(tmp_path, 0, cut)
    snapshot(tmp_path, 1, 20)
    log = EventLog(tmp_path, 0)
    log.add(died=1, number=15)
    log.close()
    for _ in range(2):  # and not the second time
        loaded = load_cut(tmp_path, SeatCounts(2, 1))
        assert loaded is not None and loaded.centre.step == 30
        assert discard_after(tmp_path, 30, [15]) == []


def test_a_final_centre_is_used_without_snapshots(tmp_path: Path) -> None:
    centre(tmp_path, 20, 10)
    for worker in range(2):
        snapshot(tmp_path, worker, 20)
    centre(tmp_path, 30, 15, Order.CENTRE)
    loaded = load_cut(tmp_path, SeatCounts(2, 1))
    assert loaded is not None and loaded.centre.step == 30


def resumed(home: Path, data: str = "digits", **training: int) -> list[str]:
    """The notes of a run of two workers that is resumed, as worker 0 has them."""
    world = SimpleNamespace(
        rank=0, size=2, call_on_root=lambda action: action(), all_gather_object=lambda has: [has] * 2
    )
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.ones(1))
    feed, trainer = SimpleNamespace(fingerprint=data, samples=100), SimpleNamespace(model=model)
    recipe = Recipe(training=TrainingRecipe(**training))
    run: Any = SimpleNamespace(world=world, home=home, feed=feed, trainer=trainer, recipe=recipe)
    return list(begin_resumed(EASGD(server="thread"), run, Recipe()).notes)


def test_snapshots_go_on_with_the_samples_and_steps_of_their_epochs(tmp_path: Path) -> None:
    centre(tmp_path, 20, 10)
    for worker in range(2):
        snapshot(tmp_path, worker, 20)
    for changed in ({"batch": 32}, {"seed": 7}):
        with pytest.raises(RecipeError, match="but the run stopped 1 steps into an epoch with"):
            resumed(tmp_path, **changed)
    with pytest.raises(CheckpointError, match=r"other data \(digits\) than now \(others\): begin a new run"):
        resumed(tmp_path, "others")
    assert len(resumed(tmp_path, "digits partitioned", epochs=20)) == 1  # older releases: without the storage
    centre(tmp_path, 30, 15, Order.CENTRE)
    assert "worker 0, 1 left no snapshot" in resumed(tmp_path, batch=32)[1]


def test_a_final_centre_with_the_name_of_a_cut_has_no_snapshots(tmp_path: Path) -> None:
    for worker in range(2):
        snapshot(tmp_path, worker, 20)
    centre(tmp_path, 20, 11, Order.CENTRE)
    assert "worker 0, 1 left no snapshot" in resumed(tmp_path)[1]


def test_a_damaged_centre_is_renamed_and_the_next_one_used(tmp_path: Path) -> None:
    for cut, exchange in ((20, 10), (30, 15)):
        centre(tmp_path, cut, exchange)
        for worker in range(2):
            snapshot(tmp_path, worker, cut)
    (tmp_path / "checkpoints" / "step-000000030" / "weights.safetensors").write_bytes(b"")
    loaded = load_cut(tmp_path, SeatCounts(2, 1))
    assert loaded is not None and loaded.centre.step == 20
    (line,) = discard_after(tmp_path, 20, [10], damaged=loaded.damaged)
    assert "it is now step-000000030.torn, and the previous one is used" in line
    assert checkpoint_names(tmp_path / "checkpoints") == ["step-000000020"]


def test_the_newest_cut_that_is_whole_goes_first() -> None:
    both = {0, 1}
    assert cuts_to_try({20: both, 30: both, 35: both}, [[20, 30, 35], [20]]) == [20, 35, 30]
    assert cuts_to_try({20: both, 30: both}, [[20, 30], [20, 30]]) == [30, 20]
    assert cuts_to_try({20: both, 30: both}, [[20, 30], [10]]) == [30, 20]  # none: the newest, as it is


def test_a_dead_worker_needs_no_snapshot() -> None:
    assert cuts_to_try({20: {0, 1}, 30: {0}}, [[20, 30], [20]]) == [30, 20]


def test_a_final_centre_needs_no_snapshots() -> None:
    assert cuts_to_try({20: {0, 1}, 30: set()}, [[20], [20]]) == [30, 20]


@given(st.dictionaries(st.integers(0, 9), st.sets(st.integers(0, 2))), st.lists(st.sets(st.integers(0, 9)), min_size=3))
def test_each_cut_is_tried_once(cuts: dict[int, set[int]], snapshots: list[set[int]]) -> None:
    order = cuts_to_try(cuts, snapshots)
    assert sorted(order) == sorted(cuts)
    complete = [all(cut in snapshots[worker] for worker in cuts[cut]) for cut in order]
    assert complete == sorted(complete, reverse=True)


EVENTS = (
    {"number": 0, "worker": 1},
    {"died": 1, "number": 1},
    {"number": 1, "worker": 0},
    {"died": 2, "number": 2},
    {"number": 2, "worker": 1},
    {"number": 3, "worker": 0},
)


def test_the_dead_are_those_that_have_not_come_back() -> None:
    assert [dead_before(EVENTS, exchange) for exchange in range(5)] == [set(), {1}, {1, 2}, {2}, {2}]
