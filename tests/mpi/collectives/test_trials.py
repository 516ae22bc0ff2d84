"""Trials of the node's ranks: what one rank refuses, none makes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from unisono.collectives import trials
from unisono.errors import MismatchError
from unisono.network.choice import Choice
from unisono.world import World


@pytest.mark.parametrize("refusing", [[], [-1]])
def test_the_variable_of_one_rank_keeps_the_built_in_choices_on_all(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refusing: list[int]
) -> None:
    if world.size == 1:
        pytest.skip("a rank alone makes no trials")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(trials.VARIABLE, "off" if world.rank - world.size in refusing else "")
    measured: list[object] = []
    seconds = trials._seconds
    monkeypatch.setattr(trials, "_seconds", lambda *arguments: measured.append(1) or seconds(*arguments))
    group = World(world.comm.Dup(), world.placement, world.table)
    for length in (50_000, 300_000):
        assert group.allreduce(torch.ones(length)).eq(world.size).all()
    assert len(measured) == (0 if refusing else 2)
    group.free()


def test_an_algorithm_that_one_rank_names_is_not_another_one_s_choice(
    differing: None, fresh: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fresh.size == 1:
        pytest.skip("one rank agrees with itself")
    measure = trials.Trials._measure
    monkeypatch.setattr(trials.Trials, "_measure", lambda *given: measure(*given) and Choice("direct", "cma"))
    tensor = torch.zeros(1 << 16)
    fresh.allreduce(tensor)
    with pytest.raises(MismatchError, match=r"direct( by cma)?\), but .* direct( by cma)?\)"):
        fresh.allreduce(tensor, "direct" if fresh.rank == 0 else "auto")
