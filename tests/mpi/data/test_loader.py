"""A training loop of one's own over a pack, on real ranks."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch

import unisono
from unisono.data import Loader
from unisono.data.storage import AUTO, FILES, STORAGES
from unisono.errors import UsageError
from unisono.world import World

BATCH, SEED, SAMPLES = 16, 4, 101
STEPS = 7

IN_PACKS = [name for name in STORAGES if name != FILES]


def of_one_order(storage: str) -> str:
    """The storage whose order is compared: what is streamed has an order of its own."""
    return storage if storage == "streamed" else "partitioned"


def trained(packs: Path, world: World, steps: int, storage: str = "partitioned") -> torch.Tensor:
    """Weights after so many steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3)).double()
    parallel = unisono.parallel(model, world)
    optimizer = torch.optim.SGD(parallel.parameters(), 0.05, momentum=0.9)
    done = 0
    with Loader(packs, world, BATCH, seed=SEED, storage=storage, augment="shift") as loader:
        while done < steps:
            for inputs, labels in islice(loader, steps - done):
                optimizer.zero_grad()
                unisono.add_samples(parallel, len(labels))
                torch.nn.functional.cross_entropy(parallel(inputs.double()), labels).backward()
                optimizer.step()
                done += 1
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("storage", [*IN_PACKS, AUTO])
def test_a_loop_on_all_ranks_gives_the_weights_of_one(group: World, packs: Path, storage: str) -> None:
    """Two epochs, the last steps of which have fewer samples than others."""
    alone = group.split(group.rank)
    expected = trained(packs, alone, 2 * STEPS, of_one_order(storage))
    torch.testing.assert_close(trained(packs, group, 2 * STEPS, storage), expected, rtol=1e-9, atol=1e-9)
    alone.free()


@pytest.mark.parametrize("storage", IN_PACKS)
def test_a_rank_has_the_samples_of_its_shares(group: World, packs: Path, storage: str) -> None:
    virtual = min(BATCH, 2 * group.size + 1)
    model = unisono.parallel(torch.nn.Linear(1, 1), group, virtual_ranks=virtual)
    alone = group.split(group.rank)
    with Loader(packs, alone, BATCH, seed=SEED, storage=storage) as loader:
        everyone = [labels.tolist() for _, labels in loader]
    with Loader(packs, group, BATCH, seed=SEED, storage=storage, virtual_ranks=virtual) as loader:
        own = [labels.tolist() for _, labels in loader]
    parts = [unisono.own_samples(model, len(labels)) for labels in everyone]
    assert own == [labels[mine.start : mine.stop] for labels, mine in zip(everyone, parts, strict=True)]
    alone.free()


@pytest.mark.parametrize("storage", IN_PACKS)
def test_a_loop_is_resumed_on_fewer_ranks(group: World, packs: Path, storage: str) -> None:
    """Stopped in the first epoch, and in the second; the parts of the ranks each make the rest."""
    part = group.split(int(group.rank >= (group.size + 1) // 2))

    def leg(world: World, state: dict[str, object] | None, steps: int) -> tuple[list[int], dict[str, object]]:
        with Loader(packs, world, BATCH, seed=SEED, storage=storage) as loader:
            if state is not None:
                loader.load_state_dict(state)
            own = [labels.tolist() for _, labels in islice(loader, steps)]
            everyone = zip(*world.all_gather_object(own), strict=True)
            return [label for step in everyone for labels in step for label in labels], loader.state_dict()

    with Loader(packs, group, BATCH, seed=SEED, storage=of_one_order(storage)) as loader:
        own = [[labels.tolist() for _, labels in loader] for _ in range(2)]
    steps = [step for epoch in own for step in epoch]
    expected = [
        label for step in zip(*group.all_gather_object(steps), strict=True) for labels in step for label in labels
    ]
    seen, state = leg(group, None, 3)
    for world, count in ((part, STEPS - 3), (group, 2), (part, STEPS - 2)):
        samples, state = leg(world, state, count)
        seen += samples
    assert len(expected) == 2 * SAMPLES
    assert seen == expected
    assert (state["epoch"], state["step"]) == (1, STEPS)
    part.free()


@pytest.mark.parametrize("storage", IN_PACKS)
def test_a_closed_loader_says_so_and_may_be_closed_again(group: World, packs: Path, storage: str) -> None:
    loader = Loader(packs, group, BATCH, storage=storage)
    next(iter(loader))
    loader.close()
    loader.close()
    for look in (loader.__iter__, loader.test_batches):
        with pytest.raises(UsageError, match="this Loader is closed; make another one"):
            next(look())
