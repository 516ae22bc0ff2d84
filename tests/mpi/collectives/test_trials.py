"""Trials of the node's ranks: what one rank refuses, none makes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from unisono.collectives import trials
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
