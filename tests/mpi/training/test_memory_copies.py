"""Copies of the state in memory: who writes them, and which one the next ranks begin with."""

from __future__ import annotations

import json
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from unisono.files import check_own
from unisono.placement import Placement, one_rank_per_node, regular
from unisono.training import memory_copies
from unisono.training.checkpoint.files import save
from unisono.training.checkpoint.layout import Checkpoint, checkpoint_names
from unisono.training.memory_copies import COPIES_KEPT, MemoryCopies, newest_copy
from unisono.training.run_directory import ALIVE, GENERATIONS
from unisono.world import World


def checkpoint(step: int) -> Checkpoint:
    return Checkpoint(step, {"weight": torch.full((3,), float(step))}, {}, {"epoch": 0})


@pytest.fixture
def folder(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that all ranks share; each host's memory is a part of it."""
    return Path(world.call_on_root(lambda: str(tmp_path_factory.mktemp("copies"))))


def world_on(world: World, placement: Placement) -> World:
    return World(world.comm.Dup(), placement, world.table)


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("place", [one_rank_per_node, lambda ranks: regular(1, 1, ranks)])
def test_two_hosts_have_copies_of_what_all_ranks_have(
    monkeypatch: pytest.MonkeyPatch, world: World, folder: Path, place: Callable[[int], Placement], alike: bool
) -> None:
    monkeypatch.setattr(memory_copies, "MAX_SHARE", 1e-9)  # the next is due in years, however slow the machine
    on = world_on(world, place(world.size))
    own = folder / str(world.rank)
    copies = MemoryCopies(own, folder, on, alike, pytest.fail)
    assert copies.due()
    for step in range(1, COPIES_KEPT + 2):
        copies.write(lambda step=step: checkpoint(step))
        assert not copies.due()
    copies.wait()
    written = world.all_gather_object(len(checkpoint_names(own)))
    assert [rank for rank, count in enumerate(written) if count] == ([0, 1] if on.nodes > 1 else [0])
    assert max(written) == COPIES_KEPT
    line = json.loads((folder / GENERATIONS).read_text())
    assert (line["first_step"], line["ranks"]) == (1, world.size)
    assert (folder / ALIVE).read_text() == str(COPIES_KEPT + 1)
    on.free()


def odd(rank: int) -> Checkpoint:
    """State that rank 0 alone has whole: of several kinds, some in the same memory, some without elements."""
    shared = torch.arange(6.0).reshape(2, 3).t() + rank
    weights = OrderedDict(tied=shared, again=shared, flag=torch.tensor(rank == 0), none=torch.empty(0, 2))
    weights._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    state = {"ranks": [{"half": torch.full((5,), 0.5, dtype=torch.bfloat16), "wave": torch.tensor([1 + 2j])}, (3, "x")]}
    return Checkpoint(7, weights, state if rank == 0 else {}, {"loss": 0.25 + rank})


def test_the_second_host_has_what_rank_0_alone_has_gathered(
    monkeypatch: pytest.MonkeyPatch, world: World, folder: Path
) -> None:
    """The same bytes, from which the next ranks begin if the first host is lost. Rank 0 keeps it without another."""
    on = world_on(world, one_rank_per_node(world.size))
    own = folder / str(world.rank)
    copies = MemoryCopies(own, folder, on, False, pytest.fail)
    send, before = memory_copies._send, list[str]()

    def send_late(*what: Any) -> None:
        copies.wait()
        before.extend(checkpoint_names(own))
        send(*what)

    monkeypatch.setattr(memory_copies, "_send", send_late)
    copies.write(lambda: odd(world.rank))
    assert len(before) == (world.rank == 0 and world.size > 1)
    files = {path.name: path.read_bytes() for path in sorted(own.glob("step-*/*"))}
    everyone = world.all_gather_object(files)
    assert everyone[0]
    assert all(having == everyone[0] for having in everyone[1:2])
    if world.rank == 0 and world.size > 1:
        shutil.rmtree(own)
    newest = newest_copy(own, on)
    assert newest is not None
    assert (newest.step, newest.progress) == (7, {"loss": 0.25})
    assert torch.equal(newest.weights["tied"], odd(0).weights["tied"])
    assert newest.weights._metadata == {"": {"version": 1}}  # type: ignore[attr-defined]
    assert newest.optimizer["ranks"][1] == (3, "x")
    on.free()


def test_the_newest_copy_that_is_whole_is_found(monkeypatch: pytest.MonkeyPatch, world: World, folder: Path) -> None:
    on = world_on(world, one_rank_per_node(world.size))
    own = folder / str(world.rank)
    assert newest_copy(own, on) is None
    check_own(own)
    save(own, checkpoint(10 + world.rank))
    with monkeypatch.context() as patch:
        for name in ("call_on_root", "all_gather_object"):
            patch.delattr(World, name)  # they unpickle what other ranks send
        newest = newest_copy(own, on)
    assert newest is not None
    assert newest.step == 9 + world.size
    assert newest.weights["weight"].tolist() == [float(newest.step)] * 3
    if world.rank == world.size - 1:
        next(own.glob("step-*/weights.safetensors")).write_bytes(b"torn")
    newest = newest_copy(own, on)
    assert (-1 if newest is None else newest.step) == (8 + world.size if world.size > 1 else -1)
    own.chmod(0o755)
    assert newest_copy(own, on) is None, "others may have written it"
    on.free()


def test_a_host_without_memory_goes_on_without_copies(world: World, folder: Path) -> None:
    own, warnings = folder / str(world.rank), list[str]()
    own.write_text("in the way")
    world.call_on_root(lambda: (folder / ALIVE).write_text("118"))  # of the generation before
    copies = MemoryCopies(own, folder, world, True, warnings.append)
    copies.write(lambda: checkpoint(1))
    if world.rank == 0 and world.nodes == 1:
        assert (folder / ALIVE).read_text() == ""
    copies.write(lambda: checkpoint(2))
    if world.rank == 0:
        assert (folder / ALIVE).read_text() == ""
    assert len(warnings) == (world.rank == 0)
