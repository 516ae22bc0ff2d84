"""The key-value store: every overlap sums rightly, in any order of what is ready, and leaves nothing behind."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from unisono.engine import Variable
from unisono.errors import UsageError
from unisono.step.overlaps import OVERLAPS
from unisono.step.store import create
from unisono.world import World

SIZES = (1, 1000, 0, 70_001, 64)
NAMES = sorted(OVERLAPS)


def value_of(rank: int, key: int, step: int) -> torch.Tensor:
    return torch.full((SIZES[key],), float((rank + 1) * (key + 1) + step))


@pytest.mark.parametrize("name", NAMES)
def test_sums_of_all_keys(world: World, name: str) -> None:
    with create(name, world) as store:
        weights = [value_of(world.rank, key, 0) for key in range(len(SIZES))]
        for key, weight in enumerate(weights):
            store.init(key, weight)
            torch.testing.assert_close(weight, value_of(0, key, 0), rtol=0, atol=0)
        for step in range(5):
            gradients = [value_of(world.rank, key, step) for key in range(len(SIZES))]
            for key, gradient in enumerate(gradients):
                store.push(key, gradient)
            for key, gradient in enumerate(gradients):
                store.pull(key, gradient)
            store.barrier()
            for key, gradient in enumerate(gradients):
                wanted = sum(value_of(rank, key, step) for rank in range(world.size))
                torch.testing.assert_close(gradient, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_that_become_ready_in_any_order(world: World, name: str) -> None:
    """Each rank computes its gradients on another thread, in an order of its own; updates follow on the same engine."""
    keys = range(len(SIZES))
    generator = random.Random(world.rank)
    with create(name, world) as store:
        weights = [torch.zeros(SIZES[key]) for key in keys]
        for key in keys:
            store.init(key, weights[key])
        updated = [Variable(f"weights {key}") for key in keys]
        for step in range(10):
            gradients = [torch.full((SIZES[key],), float("nan")) for key in keys]
            computed = [store.engine.expect([store.variable(key)], f"the gradient of {key}") for key in keys]

            def compute(step: int = step, gradients: list[torch.Tensor] = gradients, computed: list = computed) -> None:
                for key in generator.sample(keys, len(keys)):
                    time.sleep(generator.random() * 1e-3)
                    gradients[key].copy_(value_of(world.rank, key, step))
                    store.engine.end(computed[key])

            thread = threading.Thread(target=compute)
            thread.start()
            for key in keys:
                store.push(key, gradients[key])
            for key in keys:
                store.pull(key, gradients[key])
                action = lambda key=key, gradients=gradients: weights[key].sub_(gradients[key])  # noqa: E731
                store.engine.push(action, [store.variable(key)], [updated[key]], name=f"update {key}")
            store.engine.wait(*updated)
            thread.join()
        for key in keys:
            wanted = -sum(value_of(rank, key, step) for rank in range(world.size) for step in range(10))
            torch.testing.assert_close(weights[key], wanted, rtol=0, atol=0)


def test_unknown_keys(world: World) -> None:
    with create("chain", world) as store:
        store.init(0, torch.zeros(3))
        with pytest.raises(UsageError, match="key 1 has not been initialised"):
            store.push(1, torch.zeros(3))
        with pytest.raises(UsageError, match="key 0 has been initialised already"):
            store.init(0, torch.zeros(3))
        with pytest.raises(UsageError, match=r"\(3,\) of torch.float32, not with \(4,\) of torch.float64"):
            store.pull(0, torch.zeros(4, dtype=torch.float64))


def test_no_threads_or_memory_are_left(world: World) -> None:
    before = threading.active_count()
    for name in NAMES:
        with create(name, world) as store:
            store.init(0, torch.zeros(10))
            store.push(0, torch.ones(10))
            store.pull(0, torch.ones(10))
    assert threading.active_count() == before
