"""Hosts of an elastic run that are gone and come back, by a launcher that is a shell script."""

from __future__ import annotations

import math
import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from unisono.elastic import supervisor
from unisono.elastic.generations import ElasticRun, Generation
from unisono.elastic.supervisor import Hosts, Supervisor
from unisono.training.recipe import Recipe


@pytest.fixture
def up(tmp_path: Path) -> Path:
    """A folder with a file for each host that starts programs."""
    folder = tmp_path / "up"
    folder.mkdir()
    for host in ("a", "b"):
        (folder / host).touch()
    return folder


@pytest.fixture
def hosts(tmp_path: Path, up: Path, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    monkeypatch.setattr(supervisor, "ASK_SECONDS", 0.0)
    monkeypatch.setattr(supervisor, "SILENT_SECONDS", 0.01)
    launcher = tmp_path / "mpiexec"
    launcher.write_text(f"#!/bin/sh\n[ -e {up}/$2 ] || exit 1\ngrep -q late {up}/$2 && sleep 60\nexit 0\n")
    launcher.chmod(0o755)
    return Hosts(ElasticRun(tmp_path / "run", hosts=("a", "b"), mpiexec=launcher))


def until_changed(hosts: Hosts, silence: float) -> list[str]:
    while not hosts.look(silence):
        pass
    return hosts.present


def test_a_host_that_is_silent_and_does_not_answer_is_gone_until_it_does(hosts: Hosts, up: Path) -> None:
    (up / "b").unlink()
    assert until_changed(hosts, math.inf) == ["a"]
    (up / "b").touch()
    assert until_changed(hosts, 0.0) == ["a", "b"]


def test_while_ranks_keep_states_no_host_is_asked(hosts: Hosts, up: Path) -> None:
    (up / "b").unlink()
    assert not any(hosts.look(0.0) for _ in range(100))
    assert hosts.present == ["a", "b"]


def test_silence_to_which_all_answer_is_twice_as_long_the_next_time(
    hosts: Hosts, up: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "MAX_SILENT_SECONDS", 0.03)
    patience = [hosts.patience]
    while hosts.patience < 0.03:
        assert not hosts.look(math.inf)
        patience += [hosts.patience] * (hosts.patience > patience[-1])
    assert patience == [0.01, 0.02, 0.03]
    (up / "b").unlink()
    assert until_changed(hosts, math.inf) == ["a"]
    assert hosts.patience == 0.03


def test_a_host_that_answers_late_is_gone_unless_ranks_keep_states_meanwhile(
    hosts: Hosts, up: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "ANSWER_SECONDS", 0.5)
    (up / "a").write_text("late")
    assert until_changed(hosts, math.inf) == ["b"]
    hosts.present = ["a", "b"]
    while not hosts._asked:
        hosts.look(math.inf)
    while hosts._asked:
        assert not hosts.look(0.0)
    assert hosts.present == ["a", "b"]


def test_after_a_death_all_are_asked(hosts: Hosts, up: Path) -> None:
    hosts.find()
    assert hosts.present == ["a", "b"]
    (up / "a").unlink()
    hosts.find()
    assert hosts.present == ["b"]


def test_a_host_that_was_not_named_at_the_start_is_asked_once_it_joins(hosts: Hosts, up: Path) -> None:
    hosts.named.append("c")
    assert not any(hosts.look(0.0) for _ in range(20))
    (up / "c").touch()
    assert until_changed(hosts, 0.0) == ["a", "b", "c"]


def test_a_run_whose_hosts_start_nothing_names_them(hosts: Hosts, up: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (up / "a").unlink()
    (up / "b").unlink()
    run = replace(hosts._run, later=["run", "t.py"], ranks=2)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as requests:
        assert Supervisor(run)._play(requests) == 1
    assert re.search(r"none of the hosts a, b starts programs; try \S+mpiexec -hosts a ", capfd.readouterr().err)


@pytest.mark.parametrize(("batch", "ranks"), [(64, 4), (3, 3)])
def test_after_a_host_is_gone_as_many_ranks_follow_as_can_train(hosts: Hosts, batch: int, ranks: int) -> None:
    recipe = replace(Recipe(), training=replace(Recipe().training, batch=batch))
    run = replace(hosts._run, hosts=("a", "b", "c"), recipe=recipe, ranks=6)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as requests:
        end = Supervisor(run)._train(Generation(6), False, requests)
    assert (end.code, end.ranks) == (1, ranks)
