"""Every test here runs on all ranks at once. Rank 0 reports; a rank on which a test fails says so and ends all."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from unisono.placement import place
from unisono.world import World, init

_WORLD = pytest.StashKey[World]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_WORLD] = init()
    if config.stash[_WORLD].rank:
        config.pluginmanager.unregister(name="terminalreporter")


@pytest.fixture
def world(request: pytest.FixtureRequest) -> World:
    """All ranks."""
    return request.config.stash[_WORLD]


@pytest.fixture
def group(world: World) -> Iterator[World]:
    """All ranks, as a group whose shared memory is given back after the test."""
    group = world.split(0)
    yield group
    group.free()


@pytest.fixture
def spread(world: World) -> Iterator[World]:
    """All ranks, as if they sat on two nodes by turns: what crosses nodes goes by messages."""
    comm = world.comm.Dup()
    spread = World(comm, place([rank % 2 for rank in range(world.size)]), world.table)
    yield spread
    spread.free()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    world = item.config.stash[_WORLD]
    if report.failed and world.size > 1:
        print(f"\nrank {world.rank}: {item.nodeid}\n{report.longreprtext}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        world.abort(1)
    return report
