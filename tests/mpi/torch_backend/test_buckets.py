"""Buckets of DistributedDataParallel on real ranks: shared memory, the same gradients, and the memory's end."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import unisono  # noqa: F401 - registers the backend
from unisono.call import Call
from unisono.errors import BackendError
from unisono.placement import place
from unisono.torch_backend.mpi_job import mpi_job
from unisono.transports import node_memory
from unisono.world import World

FORMS: dict[str, dict[str, Any]] = {
    "copies": {},
    "views": {"gradient_as_bucket_view": True},
    "several": {"bucket_cap_mb": 0.5},
    "static": {"static_graph": True, "gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True, "bucket_cap_mb": 0.5},
}


@pytest.fixture(scope="module", autouse=True)
def default_group() -> Iterator[None]:
    dist.init_process_group("unisono", timeout=timedelta(seconds=60))
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def several_ranks(world: World) -> None:
    if world.size == 1:
        pytest.skip("one rank shares nothing")


def network() -> nn.Sequential:
    """The same weights on every rank, 1.4 MB: more than the schedule `flat` takes."""
    torch.manual_seed(0)
    layers = nn.Linear(40, 400), nn.Tanh(), nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 3)
    return nn.Sequential(*layers).double()


def batch(owner: int, index: int = 0) -> torch.Tensor:
    return torch.randn(8, 40, generator=torch.Generator().manual_seed(100 * index + owner), dtype=torch.float64)


def expected(owners: int, index: int = 0) -> list[torch.Tensor]:
    """Gradients of one process with the batches of the first `owners` ranks, divided by the number of ranks."""
    model = network()
    for owner in range(owners):
        (model(batch(owner, index)).square().sum() / dist.get_world_size()).backward()
    return gradients(model)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def shared(tensor: torch.Tensor, group: Any = None) -> bool:
    """True if the ranks of a process group share a tensor's memory."""
    window: Any = (group or dist.group.WORLD)._group.find_shared(tensor.data_ptr(), tensor.nbytes)
    return window is not None


def mappings() -> int:
    """Mappings of memory that ranks share, in this process."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:unisono")


def observed(model: DistributedDataParallel, group: Any = None) -> list[bool]:
    """Whether each bucket that is reduced from here on is shared, in a list that grows."""
    seen: list[bool] = []

    def hook(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append(shared(bucket.buffer(), group))
        return allreduce_hook(group or dist.group.WORLD, bucket)

    hook.__annotations__.clear()  # PyTorch would compare them, as they are in words here
    model.register_comm_hook(None, hook)  # type: ignore[arg-type]
    return seen


def backward(model: nn.Module, index: int) -> None:
    model.zero_grad()
    model(batch(dist.get_rank(), index)).square().sum().backward()


@pytest.mark.parametrize("form", FORMS)
def test_buckets_are_shared_and_gradients_are_those_of_one_process(form: str) -> None:
    before = mappings()
    model = DistributedDataParallel(network(), **FORMS[form])
    made = mappings()
    seen = observed(model)
    for index in range(3):
        backward(model, index)
        torch.testing.assert_close(gradients(model), expected(dist.get_world_size(), index))
    assert made > before
    assert len(seen) >= 3
    assert all(seen)
    del model
    assert mappings() == before


def test_rebuilt_buckets_replace_the_first() -> None:
    before = mappings()
    model = DistributedDataParallel(network(), gradient_as_bucket_view=True)
    backward(model, 0)
    (first,) = {gradient.untyped_storage().data_ptr() for gradient in gradients(model)}
    held, mapped = gradients(model)[0], mappings() - before
    assert mapped == dist.get_world_size()
    backward(model, 1)
    second = {gradient.untyped_storage().data_ptr() for gradient in gradients(model)}
    assert second
    assert first not in second
    assert mappings() - before > mapped  # a gradient of the first is still held
    value = held.clone()
    backward(model, 2)
    assert torch.equal(held, value)
    del held
    assert mappings() - before == len(second) * mapped


def noted(calls: list[str], made: Callable[..., Any], call: Call, *programs: Any) -> Any:
    calls.append(call.description)
    return made(call, *programs)


def test_the_default_hook_reduces_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    group: Any = dist.group.WORLD
    model = DistributedDataParallel(network())
    signals = group._group._memory.signals
    for name in ("prepare_barrier", "connect"):
        made = getattr(signals, name)
        monkeypatch.setattr(signals, name, partial(noted, calls, made))
    backward(model, 0)
    assert any(call.startswith("allreduce(") and "in window" in call for call in calls)
    torch.testing.assert_close(gradients(model), expected(dist.get_world_size()))


@pytest.mark.parametrize("divided_by_all", [True, False])
def test_a_rank_that_has_joined_gives_zeros_in_other_memory(divided_by_all: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(network())
    passes = []
    with model.join(divide_by_initial_world_size=divided_by_all):
        for index in range(rank + 2):
            backward(model, index)
            passes.append([gradient.clone() for gradient in gradients(model)])
    for index, own in enumerate(passes):
        reference = network()
        owners = range(max(0, index - 1), size)
        for owner in owners:
            (reference(batch(owner, index)).square().sum() / (size if divided_by_all else len(owners))).backward()
        torch.testing.assert_close(own, gradients(reference))


def test_an_all_reduce_of_a_bucket_on_some_ranks_only() -> None:
    group: Any = dist.group.WORLD
    rank, size = dist.get_rank(), dist.get_world_size()
    mixed = group.empty(100_000, torch.float32)
    assert shared(mixed)
    if rank == 0:
        mixed = torch.zeros(100_000)
    for part in (mixed, mixed[:50_000], mixed[rank : rank + 50_000], mixed[: 99_999 + rank % 2][:90_000]):
        mixed.fill_(rank + 1)
        dist.all_reduce(part)
        assert set(part.tolist()) == {size * (size + 1) / 2}


def test_a_group_of_some_ranks() -> None:
    members = list(range(dist.get_world_size() - 1, 0, -1)) if dist.get_world_size() > 2 else [1, 0]
    group: Any = dist.new_group(members)
    if dist.get_rank() in members:
        model = DistributedDataParallel(network(), process_group=group)
        seen = observed(model, group)
        backward(model, 0)
        backward(model, 0)
        assert seen
        assert all(seen)
        assert not shared(gradients(model)[0], group)
        dist.destroy_process_group(group)


def test_a_rank_may_copy_a_model_alone() -> None:
    model = DistributedDataParallel(network())
    average = copy.deepcopy(model) if dist.get_rank() == 0 else None
    for index in range(2):
        backward(model, index)
        torch.testing.assert_close(gradients(model), expected(dist.get_world_size(), index))
    if average is not None:
        with torch.no_grad():
            assert average(batch(0)).equal(model(batch(0)))
    made = mappings()
    every = copy.deepcopy(model)
    for index in range(2):
        backward(every, index)
        torch.testing.assert_close(gradients(every), expected(dist.get_world_size(), index))
    assert mappings() == made, "copies share nothing"


def test_gradients_outlive_their_group() -> None:
    before = mappings()
    group: Any = dist.new_group(list(range(dist.get_world_size())))
    model = DistributedDataParallel(network(), process_group=group, gradient_as_bucket_view=True)
    backward(model, 0)
    assert shared(gradients(model)[0], group)
    dist.destroy_process_group(group)
    torch.testing.assert_close(gradients(model), expected(dist.get_world_size()))
    kept = gradients(model)
    del model
    torch.testing.assert_close(kept, expected(dist.get_world_size()))
    kept.clear()
    assert mappings() == before


def test_unequal_buckets_are_named() -> None:
    group = dist.new_group(list(range(dist.get_world_size())))
    megabytes = 0.5 if dist.get_rank() else 25
    with pytest.raises(BackendError, match=r"(?s)empty, number .* called empty\(\d+ x float64\), but rank \d"):
        DistributedDataParallel(network(), process_group=group, find_unused_parameters=True, bucket_cap_mb=megabytes)
    dist.destroy_process_group(group)


def test_buckets_of_several_nodes_are_ordinary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    before = mappings()
    monkeypatch.setattr(mpi_job().world, "placement", place([rank % 2 for rank in range(dist.get_world_size())]))
    group = dist.new_group(list(range(dist.get_world_size())))
    monkeypatch.undo()
    model = DistributedDataParallel(network(), process_group=group)
    seen = observed(model, group)
    for index in range(2):
        backward(model, index)
        torch.testing.assert_close(gradients(model), expected(dist.get_world_size(), index))
    assert not any(seen)
    assert mappings() == before
    dist.destroy_process_group(group)


def test_ranks_that_cannot_see_each_other_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError

    if dist.get_rank() == 1:
        monkeypatch.setattr(torch, "from_file", refuse)
    model = DistributedDataParallel(network())
    seen = observed(model)
    backward(model, 0)
    torch.testing.assert_close(gradients(model), expected(dist.get_world_size()))
    assert not any(seen)


def test_the_variable_of_pytorch_leaves_buckets_in_ordinary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    before = mappings()
    monkeypatch.setenv("DDP_DISABLE_COMM_MEM", "1")
    model = DistributedDataParallel(network())

    def resize(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        bucket.buffer().resize_(bucket.buffer().numel() + 1)
        bucket.buffer().resize_(bucket.buffer().numel() - 1)
        return allreduce_hook(dist.group.WORLD, bucket)

    resize.__annotations__.clear()
    model.register_comm_hook(None, resize)  # type: ignore[arg-type]
    backward(model, 0)
    torch.testing.assert_close(gradients(model), expected(dist.get_world_size()))
    assert mappings() == before


def test_other_backends_allocate_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(node_memory, "allocate_shared", lambda *arguments: asked.append(arguments))
    group = dist.new_group([0], backend="gloo")
    if dist.get_rank() == 0:
        model = DistributedDataParallel(network(), process_group=group)
        backward(model, 0)
        backward(model, 0)
    assert not asked


def test_fsdp_may_ask_for_memory_of_the_process_group() -> None:
    model = fully_shard(network())
    model.set_allocate_memory_from_process_group_for_comm(enable=True)
    model(batch(dist.get_rank())).square().sum().backward()
    for gradient, wanted in zip(gradients(model), expected(dist.get_world_size()), strict=True):
        assert isinstance(gradient, DTensor)
        torch.testing.assert_close(gradient.full_tensor(), wanted)
