"""Groups that the tests of a file share: making one takes longer than most collectives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from unisono.placement import place
from unisono.world import World


@pytest.fixture(scope="module")
def group(world: World) -> Iterator[World]:
    """All ranks."""
    group = world.split(0)
    yield group
    group.free()


@pytest.fixture(scope="module")
def spread(world: World) -> Iterator[World]:
    """All ranks, as if they sat on two nodes by turns: what crosses nodes goes by messages."""
    spread = World(world.comm.Dup(), place([rank % 2 for rank in range(world.size)]), world.table)
    yield spread
    spread.free()


@pytest.fixture
def fresh(world: World) -> Iterator[World]:
    """All ranks, as a group that the test has for itself."""
    group = world.split(0)
    yield group
    group.free()
