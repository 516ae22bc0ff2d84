"""A storage that real ranks choose by their memory."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest
import torch

from unisono.data.feed import Feed, packed_feed
from unisono.data.options import DataOptions
from unisono.data.storage import free_memory
from unisono.errors import PackError
from unisono.world import World

SEED = 3


def batches_of(feed: Feed) -> list[torch.Tensor]:
    batches = [inputs.clone() for inputs, _ in feed.epoch(1, 16, 0)]
    feed.close()
    return batches


@pytest.mark.parametrize("shared", [1 << 40, 100, inf])
def test_every_choice_gives_the_same_batches(
    group: World, spread: World, packs: Path, shared: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    auto = DataOptions(pack=str(packs), storage="auto")
    for world in (group, spread):
        expected = batches_of(packed_feed(DataOptions(pack=str(packs)), world, SEED))
        with monkeypatch.context() as patch:
            patch.setattr(free_memory, "free_bytes", lambda shared=False, most=shared: most if shared else 1 << 40)
            feed = packed_feed(auto, world, SEED)
            (note,) = feed.notes
            assert set(world.all_gather_object(note)) == {note}
            groups = world.nodes if world.size % world.nodes == 0 else 1
            partitioned = f"in {groups} groups" if groups > 1 and shared != inf else "over all ranks"
            chosen = "replicated" if shared == 1 << 40 else f"partitioned {partitioned}"
            assert note.startswith(f"storage: {chosen}: ")
            assert all(torch.equal(batch, other) for batch, other in zip(batches_of(feed), expected, strict=True))


def test_by_the_memory_of_this_machine(group: World, packs: Path) -> None:
    feed = packed_feed(DataOptions(pack=str(packs), storage="auto"), group, SEED)
    (note,) = feed.notes
    assert note.startswith("storage: ")
    feed.close()


def test_a_storage_that_is_named_has_no_note(group: World, packs: Path) -> None:
    feed = packed_feed(DataOptions(pack=str(packs)), group, SEED)
    assert feed.notes == ()
    feed.close()


def test_ranks_out_of_step_refuse_a_storage_that_a_replay_may_choose_otherwise(group: World, packs: Path) -> None:
    with pytest.raises(PackError, match=r"data\.storage = \"auto\", but ranks out of step"):
        packed_feed(DataOptions(pack=str(packs), storage="auto"), group, SEED, out_of_step=True)
