"""Asynchronous runs by the command: trained, stopped, resumed and replayed bit for bit.

Ranks that are stopped are started for it; those that resume and replay keep running.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.persistent_ranks import PersistentRanks
from tests.progress import Run, poll_until
from tests.usage_errors import assert_one_line_error

from unisono.asynchronous.event_log import log_path, read_events
from unisono.launch import launch_environment
from unisono.training.recipe import find_recipe

OPTIONS = (
    *("digits", "--ranks", "3", "--set", "rule.name=easgd", "--set", "training.epochs=3"),
    *("--set", "model.name=worker_nets:small"),
)
"""Two workers and a server."""

NETWORK = """
import time
from pathlib import Path
from torch import nn

class Small(nn.Sequential):
    def forward(self, inputs):
        if Path("is_stopped").exists() and Path("mine/metrics.jsonl").exists():
            time.sleep(0.2)
        return super().forward(inputs)

def small(classes, channels):
    return Small(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, classes))
"""
"""Network that is slow from the second epoch on, in a run that is to be stopped there: it does not end before."""


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PersistentRanks]:
    with PersistentRanks(3, tmp_path_factory.mktemp("three_ranks"), one_code=False) as ranks:
        yield ranks


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def stop_after_an_epoch(folder: Path, *options: str) -> None:
    """Begin the run `mine`, and end it by a signal in its second epoch or later."""
    (folder / "worker_nets.py").write_text(NETWORK)
    (folder / "is_stopped").touch()
    command = [sys.executable, "-m", "unisono", "train", *OPTIONS, *options, "--run", "mine"]
    environment = launch_environment(os.environ, terminal=False)
    process = subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    metrics = folder / "mine" / "metrics.jsonl"
    poll_until(lambda: lines_of(metrics), lambda count: count >= 1 or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate()
    assert process.returncode == 143, said
    assert "resume with: unisono train --resume mine" in said, said
    (folder / "is_stopped").unlink()


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a run that was stopped, made once; nobody is to change it."""
    folder = tmp_path_factory.mktemp("stopped")
    stop_after_an_epoch(folder)
    return folder


def test_a_stopped_run_resumes_and_the_whole_replays_bit_for_bit(
    three_ranks: PersistentRanks, stopped_run: Path, tmp_path: Path
) -> None:
    shutil.copytree(stopped_run, tmp_path, dirs_exist_ok=True)
    done = three_ranks(("train", "--resume", "mine"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "resumes after " in done.stdout
    assert "communicating, overlapped" in done.stdout
    last = json.loads((tmp_path / "mine" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["computing"] > 0 and last["communicating"] > 0, "as the mean over the workers"
    epochs = [json.loads(line)["epoch"] for line in (tmp_path / "mine" / "metrics.jsonl").read_text().splitlines()]
    assert epochs == [1, 2, 3]
    again = three_ranks(("train", "--replay", "mine", "--run", "again"), tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "the final weights are those of mine, bit for bit" in again.stdout
    swapped_log(tmp_path / "mine")
    other = three_ranks(("train", "--replay", "mine", "--run", "other"), tmp_path)
    assert other.returncode == 1
    assert "the final weights differ from those of mine" in other.stdout


def test_two_servers_resume_with_their_own_numbers(three_ranks: PersistentRanks, tmp_path: Path) -> None:
    servers = ("--set", "rule.server=thread", "--set", "rule.servers=2", "--set", "rule.staleness=4")
    stop_after_an_epoch(tmp_path, *servers)
    done = three_ranks(("train", "--resume", "mine"), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for server in range(2):
        last, exchange = [-1] * 3, 0
        for event in read_events(tmp_path / "mine", server):
            assert event["number"] == exchange
            if "worker" in event:
                assert event["stale"] == exchange - last[event["worker"]] - 1 <= 4
                last[event["worker"]], exchange = exchange, exchange + 1
        assert any("several servers" in event.get("inexact", "") for event in read_events(tmp_path / "mine", server))


def test_other_numbers_of_workers_go_on_at_the_centre(on_ranks: Run, stopped_run: Path, tmp_path: Path) -> None:
    """Checkpoints have later names than before, or the next resumed run would take an old one."""
    shutil.copytree(stopped_run, tmp_path, dirs_exist_ok=True)
    checkpoints = tmp_path / "mine" / "checkpoints"
    before = max(path.name for path in checkpoints.iterdir())
    done = on_ranks("train", "--resume", "mine", "--ranks", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the run had 2 workers and 1 servers: all workers begin at the centre" in done.stdout
    events = read_events(tmp_path / "mine", 0)
    first = next(event["number"] for event in events if "inexact" in event)
    served = [event for event in events if "worker" in event]
    assert [event["number"] for event in served] == list(range(len(served)))
    assert {event["stale"] for event in served[first:]} == {0}
    assert served[first]["sent"] >= served[first - 1]["sent"] > 0
    assert max(path.name for path in checkpoints.iterdir()) > before
    epochs = [json.loads(line)["epoch"] for line in (tmp_path / "mine" / "metrics.jsonl").read_text().splitlines()]
    assert epochs == [1, 2, 3]


def swapped_log(run: Path) -> None:
    """Exchange the workers of two events that follow each other."""
    path = log_path(run, 0)
    events = [json.loads(line) for line in path.read_text().splitlines()]
    first = next(n for n in range(10, len(events)) if events[n]["worker"] != events[n + 1]["worker"])
    first_event, next_event = events[first], events[first + 1]
    first_event["worker"], next_event["worker"] = next_event["worker"], first_event["worker"]
    path.write_text("".join(json.dumps(event) + "\n" for event in events))


def test_what_cannot_be_replayed_is_refused(in_process: Run, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    shutil.copy(find_recipe(Path("digits")), tmp_path / "mine" / "recipe.toml")
    assert_one_line_error(in_process("train", "--replay", "mine"), "--replay mine: its rule, bsp, is synchronous")
    assert_one_line_error(in_process("train", "digits", "--replay", "mine"), "--replay takes the recipe of the run")
    assert_one_line_error(in_process("train", "--replay", "other"), "other holds no run")


def test_too_few_ranks_are_refused_before_they_start(in_process: Run) -> None:
    refused = in_process("train", "digits", "--ranks", "1", "--set", "rule.name=easgd")
    assert_one_line_error(refused, "1 rank is too few: start 2 or more")
