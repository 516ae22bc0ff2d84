"""The key-value store: every overlap sums rightly, in any order of what is ready, and leaves nothing behind."""

from __future__ import annotations

import random
import threading
import time
import weakref

import pytest
import torch
from tests.engine.test_engine import expect

from unisono import KVStore
from unisono.engine import Variable
from unisono.errors import OperationError, UsageError
from unisono.step.overlaps import OVERLAPS
from unisono.world import World

SIZES = (1, 1000, 0, 70_001, 64)
NAMES = sorted(OVERLAPS)


def value_of(rank: int, key: int, step: int) -> torch.Tensor:
    return torch.full((SIZES[key],), float((rank + 1) * (key + 1) + step))


def exchange(store: KVStore, gradients: list[torch.Tensor]) -> None:
    """Replace each gradient by the sum over ranks, key by key."""
    for key, gradient in enumerate(gradients):
        store.push(key, gradient)
    for key, gradient in enumerate(gradients):
        store.pull(key, gradient)
    store.barrier()


@pytest.mark.parametrize("name", NAMES)
def test_sums_of_all_keys(world: World, name: str) -> None:
    with KVStore(world, name) as store:
        weights = [value_of(world.rank, key, 0) for key in range(len(SIZES))]
        for key, weight in enumerate(weights):
            store.init(key, weight)
            torch.testing.assert_close(weight, value_of(0, key, 0), rtol=0, atol=0)
        for step in range(5):
            gradients = [value_of(world.rank, key, step) for key in range(len(SIZES))]
            exchange(store, gradients)
            for key, gradient in enumerate(gradients):
                wanted = sum(value_of(rank, key, step) for rank in range(world.size))
                torch.testing.assert_close(gradient, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_a_device(world: World, device: torch.device, name: str) -> None:
    """That are computed while they are pushed, and read at once when they have been pulled."""
    with KVStore(world, name) as store:
        keys = range(len(SIZES))
        for key in keys:
            store.init(key, weight := value_of(world.rank, key, 0).to(device))
            torch.testing.assert_close(weight.cpu(), value_of(0, key, 0), rtol=0, atol=0)
        for step in range(3):
            gradients = [value_of(world.rank, key, step).to(device).mul(3) for key in keys]
            exchange(store, gradients)
            for key, gradient in enumerate(gradients):
                wanted = sum(3 * value_of(rank, key, step) for rank in range(world.size))
                torch.testing.assert_close(gradient.mul(2).cpu(), 2 * wanted, rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_an_updater_of_values_on_a_device_has_those_of_the_host(world: World, device: torch.device, name: str) -> None:
    def pulled(place: torch.device) -> torch.Tensor:
        weight = value_of(world.rank, 1, 0).double().to(place).div(3)
        with KVStore(world, name, updater=lambda _, total, stored: stored.sub_(total, alpha=0.1)) as store:
            store.init(1, weight)
            for step in range(3):
                store.push(1, gradient := weight.mul(world.rank + step))
                store.pull(1, weight)
                store.wait(1)
                del gradient
        return weight.mul(2).cpu()

    torch.testing.assert_close(pulled(device), pulled(torch.device("cpu")), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_that_become_ready_in_any_order(world: World, name: str) -> None:
    """Each rank computes its gradients on another thread, in an order of its own; updates follow on the same engine."""
    keys = range(len(SIZES))
    generator = random.Random(world.rank)
    with KVStore(world, name) as store:
        weights = [torch.zeros(SIZES[key]) for key in keys]
        for key in keys:
            store.init(key, weights[key])
        updated = [Variable(f"weights {key}") for key in keys]
        for step in range(10):
            gradients = [torch.full((SIZES[key],), float("nan")) for key in keys]
            computed = [expect(store.engine, store.variable(key), f"the gradient of {key}") for key in keys]

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


@pytest.mark.parametrize("name", NAMES)
def test_lists_of_keys_in_every_overlap(world: World, name: str) -> None:
    """Keys need not be pushed in their order; the sum of a push replaces that of the push before."""
    keys = [3, 0, 4]
    with KVStore(world, name) as store:
        firsts = [value_of(world.rank, key, 0) for key in keys]
        store.init(keys, firsts)
        pulled = [torch.empty(SIZES[key]) for key in keys]
        store.pull(keys, pulled)
        store.wait(keys)
        assert all(torch.equal(tensor, value_of(0, key, 0)) for key, tensor in zip(keys, pulled, strict=True))
        for step in range(3):
            pushed = [value_of(world.rank, key, step) for key in keys]
            store.push(keys, pushed)
            store.pull(keys, pulled)
            store.wait(keys)
            for key, tensor, mine in zip(keys, pulled, pushed, strict=True):
                wanted = sum(value_of(rank, key, step) for rank in range(world.size))
                torch.testing.assert_close(tensor, wanted, rtol=0, atol=0)
                assert torch.equal(mine, value_of(world.rank, key, step)), "a push leaves its tensor alone"


def samples_of(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return inputs, inputs.sum(1, keepdim=True)


def network() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()


@pytest.mark.parametrize("name", NAMES)
def test_an_updater_on_all_ranks_gives_the_weights_of_one(world: World, name: str) -> None:
    """SGD with momentum in the store, on shares of the batch, equals PyTorch's on the whole batch."""
    expected, model = network(), network()
    optimizer = torch.optim.SGD(expected.parameters(), 0.1, momentum=0.9)
    inputs, targets = map(torch.cat, zip(*map(samples_of, range(world.size)), strict=True))
    optimizers: dict[int, torch.optim.Optimizer] = {}

    def update(key: int, total: torch.Tensor, weight: torch.Tensor) -> None:
        if key not in optimizers:
            optimizers[key] = torch.optim.SGD([weight], 0.1, momentum=0.9)
        weight.grad = total / world.size
        optimizers[key].step()

    weights = list(model.parameters())
    keys = range(len(weights))
    with KVStore(world, name, updater=update) as store:
        store.init(keys, weights)
        for _ in range(10):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(expected(inputs), targets).backward()
            optimizer.step()
            mine, wanted = samples_of(world.rank)
            model.zero_grad()
            torch.nn.functional.mse_loss(model(mine), wanted).backward()
            store.push(keys, [weight.grad for weight in weights])
            store.pull(keys, weights)
            store.wait()
    for weight, other in zip(weights, expected.parameters(), strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-12, atol=1e-12)


def test_a_key_may_be_initialised_while_sums_are_under_way(world: World) -> None:
    with KVStore(world) as store:
        large, sums = torch.ones(200_000), torch.empty(200_000)
        store.init(0, large)
        for key in range(1, 20):
            store.push(0, large)
            other = torch.full((1000,), float(10 * world.rank + key))
            store.init(key, other)
            assert torch.equal(other, torch.full((1000,), float(key)))
        store.pull(0, sums)
        store.wait(0)
        assert torch.equal(sums, torch.full((200_000,), float(world.size)))


def test_what_was_waited_for_is_not_held(world: World) -> None:
    """A loop that waits for its keys alone holds the tensors of no earlier step."""
    pushed = []
    with KVStore(world) as store:
        store.init([0, 1], [torch.zeros(10), torch.zeros(10)])
        for _ in range(5):
            first, second = torch.ones(10), torch.ones(10)
            store.push([0, 1], [first, second])
            store.pull([0, 1], [first, second])
            store.wait([0, 1])
            pushed += [weakref.ref(first), weakref.ref(second)]
            del first, second
        deadline = time.monotonic() + 60
        while any(reference() is not None for reference in pushed[:-4]) and time.monotonic() < deadline:
            time.sleep(0.01)  # a thread lets go of an operation a moment after it has ended
        assert all(reference() is None for reference in pushed[:-4])


def test_an_updater_that_fails_is_reported_by_wait(world: World) -> None:
    def fail(key: int, total: torch.Tensor, stored: torch.Tensor) -> None:
        raise ValueError("no update today")

    store = KVStore(world, updater=fail)
    store.init(7, torch.zeros(2))
    store.push(7, torch.zeros(2))
    store.pull(7, torch.zeros(2))
    with pytest.raises(OperationError, match=r"update 7.* failed: ValueError: no update today"):
        store.wait(7)
    store.close()


def test_calls_that_fit_no_key_are_refused_before_anything_is_sent(world: World) -> None:
    with KVStore(world) as store:
        store.init([0, 2], [torch.zeros(3), torch.zeros(3)])
        with pytest.raises(UsageError, match=rf"rank {world.rank}: key 1 .* \(keys are \[0, 2\]\); call init\(1, "):
            store.push([0, 1], [torch.ones(3), torch.ones(3)])
        with pytest.raises(UsageError, match="key 1 has not been initialised"):
            store.wait(1)
        with pytest.raises(UsageError, match=f"rank {world.rank}: key 3 is there twice; take another"):
            store.init([3, 3], [torch.zeros(3), torch.zeros(4)])
        with pytest.raises(UsageError, match=f"rank {world.rank}: key 2 has been initialised already"):
            store.init([1, 2], [torch.zeros(3), torch.zeros(3)])
        with pytest.raises(UsageError, match=f"rank {world.rank}: key 4 has torch.complex64, which cannot be summed"):
            store.init([1, 4], [torch.zeros(3), torch.zeros(3, dtype=torch.complex64)])
        with pytest.raises(UsageError, match=r"key 0 .* \(3,\) of torch.float32, not with \(4,\) of torch.float64"):
            store.pull(0, torch.zeros(4, dtype=torch.float64))
        pulled = torch.ones(3)
        store.pull(0, pulled)
        store.barrier()
        assert torch.equal(pulled, torch.zeros(3)), "key 0 was not pushed"
    with pytest.raises(UsageError, match="there is no overlap 'server'"):
        KVStore(world, "server")
    with pytest.raises(UsageError, match="there is no wire 'int3'"):
        KVStore(world, wire="int3")
    with pytest.raises(UsageError, match="outstanding = 0, but it has to be at least 1"):
        KVStore(world, "concurrent", outstanding=0)


def test_no_threads_or_memory_are_left(world: World) -> None:
    before = threading.active_count()
    for name in NAMES:
        with KVStore(world, name) as store:
            store.init(0, torch.zeros(10))
            store.push(0, torch.ones(10))
            store.pull(0, torch.ones(10))
    assert threading.active_count() == before
