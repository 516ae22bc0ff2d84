"""Every test here runs on all ranks at once. Rank 0 reports; a rank on which a test fails says so and ends all."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from unisono.collectives import state_queries, watch
from unisono.data.kinds import RAW
from unisono.data.pack.packing import PackOptions, pack
from unisono.data.sources import Source
from unisono.initialize import init
from unisono.placement import place
from unisono.plan import choose
from unisono.reducer import tuning
from unisono.transports import sockets
from unisono.world import World

_WORLD = pytest.StashKey[World]()


@pytest.hookimpl(trylast=True)  # once there is a reporter
def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault(sockets.VARIABLE, "off")  # chosen by their time, which a busy machine changes
    config.stash[_WORLD] = init()
    if config.stash[_WORLD].rank:
        config.pluginmanager.unregister(name="terminalreporter")


@pytest.fixture(autouse=True)
def threads_of_the_process() -> Iterator[None]:
    """Virtual ranks and recipes set the threads of their process, which the next test shares."""
    threads = torch.get_num_threads()
    yield
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def few_bucket_sizes() -> Iterator[None]:
    """Searches predict the two sizes of buckets that they measure: networks here are a bucket of all larger ones. They
    try rivals again soon, in runs of a few dozen steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "BUCKET_SIZES", choose.MEASURED_BUCKET_BYTES)
        patch.setattr(tuning, "STEPS_BETWEEN_ROUNDS", 2)
        yield


@pytest.fixture(scope="session")
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


@pytest.fixture
def differing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that are made from here on notice in a tenth of the time that ranks are in different calls."""
    monkeypatch.setattr(watch, "COMPARE_AFTER_SECONDS", 0.1)
    for module in (watch, state_queries):
        monkeypatch.setattr(module, "POLL_SECONDS", 0.02)


@pytest.fixture(scope="session")
def packs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of grey images of 8 x 8, sorted by class: 101 to train on, 37 in the test set.

    Two pixels of each are its number. Classes differ in how bright they are.
    """
    classes = ("dark", "grey", "bright")

    def picture(index: int, label: int) -> bytes:
        pixels = np.random.default_rng(index).integers(60 * label, 60 * label + 120, 64).astype(np.uint8)
        pixels[:2] = index % 256, index // 256
        return pixels.tobytes()

    def make() -> Path:
        folder = tmp_path_factory.mktemp("packs") / "numbered"
        for part, count in (("train", 101), ("test", 37)):
            labels, sizes = np.arange(count) * len(classes) // count, np.full(count, 64)
            samples = [picture(index, int(label)) for index, label in enumerate(labels)]
            keys = [str(index) for index in range(count)]
            source = Source(RAW, classes, keys, labels, sizes, samples.__getitem__, (8, 8))
            pack(source, folder / part, PackOptions(stripes=3), 1, lambda: None)
        return folder

    return request.config.stash[_WORLD].call_on_root(make)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    world = item.config.stash[_WORLD]
    if report.failed and world.size > 1:
        print(f"\nrank {world.rank}: {item.nodeid}\n{report.longreprtext}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        world.abort(1)
    return report
