"""A model's life: made parallel, changed, forgotten; worlds that go before it; models that share a world."""

from __future__ import annotations

import copy
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono
from unisono import BSP, Exchange, Trainer, World
from unisono.errors import MismatchError, UsageError
from unisono.placement import place

CHAIN = BSP(Exchange(bucket_bytes=1 << 20), "chain")


@pytest.fixture(params=["node", "spread"])
def group(request: pytest.FixtureRequest, world: World) -> Iterator[World]:
    """The ranks on one node, or as if each was on a node of its own."""
    comm = world.comm.Dup()
    made = World(comm, world.placement if request.param == "node" else place(range(world.size)), world.table)
    yield made
    made.free()


def mean_over(world: World, tensor: torch.Tensor) -> torch.Tensor:
    return sum(world.all_gather_object(tensor)) / world.size


def step(model: nn.Module, world: World, width: int = 4) -> None:
    """A backward pass, whose gradients are held against the mean of all ranks' own."""
    inputs = torch.full((2, width), float(world.rank + 1))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with unisono.no_sync(model):
        alone = torch.autograd.grad(model(inputs).square().sum(), parameters)
    model.zero_grad()
    model(inputs).square().sum().backward()
    for parameter, own in zip(parameters, alone, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, mean_over(world, own))


def held() -> tuple[int, int]:
    """Threads of this process, and mappings of shared memory."""
    return threading.active_count(), Path("/proc/self/maps").read_text().count("/memfd:unisono-")


def grown(before: tuple[int, int]) -> bool:
    """Whether more is held than before."""
    return any(now > then for now, then in zip(held(), before, strict=True))


def settles(condition: Callable[[], bool]) -> bool:
    """Whether a condition comes true: a thread holds its last action for a moment after it is over."""
    for _ in range(1000):
        if condition():
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("overlap", ["chain", "concurrent", "funnel", "auto"])
def test_an_unreferenced_model_is_freed(world: World, overlap: str) -> None:
    gc.disable()  # what is forgotten goes without the collector
    try:
        before, alive = None, weakref.WeakSet[nn.Parameter]()
        for _ in range(30):
            model = unisono.parallel(nn.Linear(40, 30), world, BSP(overlap=overlap))
            model(torch.ones(2, 40)).sum().backward()
            alive.add(model.weight)
            del model
            assert settles(lambda: not alive)
            before = before or held()
            assert settles(lambda before=before: not grown(before)), (held(), before)
    finally:
        gc.enable()


def test_an_unreferenced_trainer_is_freed(world: World) -> None:
    gc.disable()
    gc.collect()
    gc.freeze()  # what is there already is not looked through in each round
    try:
        before, alive = None, weakref.WeakSet[nn.Parameter]()
        for _ in range(10):
            model = nn.Linear(40, 3)
            alive.add(model.weight)
            trainer = Trainer(model, world, BSP(), torch.optim.SGD(model.parameters(), 0.1))
            for _ in range(2):
                trainer.step(torch.ones(2, 40), torch.zeros(2, dtype=torch.int64))
            trainer.wait()
            del model, trainer
            gc.collect()  # PyTorch's optimizers refer to themselves
            assert settles(lambda: not alive)
            before = before or held()
            assert settles(lambda before=before: not grown(before)), (held(), before)
    finally:
        gc.enable()


def test_many_models_are_alive_in_a_world(group: World) -> None:
    models = [unisono.parallel(nn.Linear(4, 4), group, CHAIN) for _ in range(2)]
    threads = held()[0]
    models += [unisono.parallel(nn.Linear(4, 4), group, CHAIN) for _ in range(30)]
    assert settles(lambda: held()[0] <= threads)
    for model in models[::10]:
        step(model, group)


def test_models_that_differ_are_named(group: World) -> None:
    if group.size == 1:
        pytest.skip("one rank differs from none")
    last = group.rank == group.size - 1

    def more() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), *([nn.Linear(4, 2)] if last else []))

    def frozen() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4).requires_grad_(not last))

    def buffers() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(4, track_running_stats=last))

    kinds: dict[str, Callable[[], nn.Module]] = {
        r"rank 0 has no more, rank \d has parameter 1.weight, \(2, 4\) of float32": more,
        r"rank 0 has parameter 0.weight, \(4, 4\) of float32, rank \d has .* frozen": frozen,
        r"parameter 0.weight, \(4, 4\) of float32, .* \(5, 4\) of float32": lambda: nn.Sequential(
            nn.Linear(4, 4 + last)
        ),
        r"rank \d has parameter 0.weight, \(4, 4\) of float64": lambda: nn.Sequential(
            nn.Linear(4, 4).to(torch.float64 if last else torch.float32)
        ),
        r"buffer 0.running_mean": buffers,
    }
    for message, make in kinds.items():
        with pytest.raises(MismatchError, match=message):
            unisono.parallel(make(), group, CHAIN)
    step(unisono.parallel(nn.Linear(4, 4), group, CHAIN), group)  # the world is as good as before


def test_models_used_in_different_order_by_ranks(world: World) -> None:
    """Alike as they are, no rank adds one's gradients to the other's."""
    if world.size == 1:
        pytest.skip("one rank has one order")
    group = world.split(0)
    models = [unisono.parallel(nn.Linear(4, 4, bias=False), group, CHAIN) for _ in range(2)]
    if group.rank == 0:
        models.reverse()
    with pytest.raises(unisono.UnisonoError, match=r"model 1.*model 2|model 2.*model 1"):
        for model in models:
            model(torch.ones(2, 4)).sum().backward()
    del models, model
    group.free()


def replaced(model: nn.Module) -> None:
    model[1] = nn.Linear(4, 3)


def assigned(model: nn.Module) -> None:
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)


def unfrozen(model: nn.Module) -> None:
    model[0].requires_grad_(True)


def adapted(model: nn.Module) -> None:
    model[1].register_parameter("extra", nn.Parameter(torch.ones(2, 4)))


@pytest.mark.parametrize("change", [replaced, assigned, unfrozen, adapted])
def test_parameters_that_change(world: World, change: Callable[[nn.Module], None]) -> None:
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2))
    unisono.parallel(model, world, CHAIN)
    step(model, world)
    with pytest.raises(UsageError, match="is parallel already"):
        unisono.parallel(model, world, CHAIN)
    change(model)
    with pytest.raises(UsageError, match=r"parameter [01]\.\w+ was added, replaced or unfrozen"):
        model(torch.ones(2, 4))
    unisono.parallel(model, world, CHAIN)
    if change is not adapted:  # the adapter is not read here
        step(model, world)


def test_a_compiled_model_is_made_parallel_again(world: World) -> None:
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2))
    compiled: Any = torch.compile(model, backend="eager")
    unisono.parallel(compiled, world, CHAIN)
    with pytest.raises(UsageError, match="is parallel already"):
        unisono.parallel(compiled, world, CHAIN)
    unfrozen(model)
    unisono.parallel(compiled, world, CHAIN)
    step(compiled, world)


def test_parameters_that_change_are_found_without_the_models_forward_pass(world: World) -> None:
    model = unisono.parallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), world, CHAIN)
    model[1] = nn.Linear(4, 4)
    with pytest.raises(UsageError, match=r"parameter 1\.weight"):
        model[1](model[0](torch.ones(2, 4))).sum().backward()


def test_parameters_may_be_frozen_and_trained_again(world: World) -> None:
    model = unisono.parallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), world, CHAIN)
    model[0].requires_grad_(False)
    step(model, world)
    assert [parameter.grad is None for parameter in model.parameters()] == [True, True, False, False]
    model[0].requires_grad_(True)
    step(model, world)
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_a_trainer_refuses_parameters_that_changed(world: World) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    trainer = Trainer(model, world, CHAIN, torch.optim.SGD(model.parameters(), 0.1))
    batch = torch.ones(2, 4), torch.zeros(2, dtype=torch.int64)
    trainer.step(*batch)
    model[1] = nn.Linear(4, 2)
    with pytest.raises(UsageError, match=r"parameter 1\.weight"):
        trainer.step(*batch)
    unisono.parallel(model, world, CHAIN)
    with pytest.raises(UsageError, match="make a new Trainer"):
        trainer.step(*batch)
    Trainer(model, world, CHAIN, torch.optim.SGD(model.parameters(), 0.1)).step(*batch)


def test_a_parameter_of_two_models_is_refused_while_both_live(world: World) -> None:
    body = nn.Linear(4, 4)
    first, second = nn.Sequential(body, nn.Linear(4, 2)), nn.Sequential(body, nn.Linear(4, 3))
    trainer = Trainer(first, world, CHAIN, torch.optim.SGD(first.parameters(), 0.1))
    for other in (second, body):
        with pytest.raises(UsageError, match=r"parameter (0\.)?weight belongs to another parallel model.*ModuleDict"):
            unisono.parallel(other, world, CHAIN)
    trainer.wait()
    del first, trainer
    step(unisono.parallel(second, world, CHAIN), world)


def test_lazy_modules_are_refused_until_they_have_shapes(world: World) -> None:
    for lazy, name in ((nn.LazyLinear(3), "weight"), (nn.LazyBatchNorm1d(affine=False), "running_mean")):
        model = nn.Sequential(nn.Tanh(), lazy)
        with pytest.raises(UsageError, match=f"1.{name} of a lazy module has no shape yet: make one forward pass"):
            unisono.parallel(model, world, CHAIN)
        model(torch.ones(2, 4))
        unisono.parallel(model, world, CHAIN)


def test_gradients_of_another_dtype_are_refused_by_name(world: World) -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    model[0].bias.grad_dtype = torch.float64
    with pytest.raises(UsageError, match=r"parameter 0.bias of torch.float32 has gradients of torch.float64"):
        unisono.parallel(model, world, CHAIN)
    other = copy.deepcopy(model)
    other[0].bias.grad_dtype = torch.float64
    unisono.parallel(other, world, unisono.LocalSGD(every=2), torch.optim.SGD(other.parameters(), 0.1))
    other(torch.ones(2, 4)).sum().backward()
    assert other[0].bias.grad.dtype == torch.float64, "it is this rank's own"
    model[0].bias.grad_dtype = None
    step(unisono.parallel(model, world, CHAIN), world)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(5, 2))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(numbers, self.table, sparse=True)


def test_sparse_gradients_are_refused_by_name(world: World) -> None:
    with pytest.raises(UsageError, match="0 gives sparse gradients"):
        unisono.parallel(nn.Sequential(nn.Embedding(5, 2, sparse=True)), world)
    model = unisono.parallel(Sparse(), world, CHAIN)
    with pytest.raises(UsageError, match="parameter table has a sparse gradient"):
        model(torch.tensor([1, 1])).sum().backward()


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_rows_that_a_forward_pass_scales_are_refused_where_ranks_are_equal(world: World, kind: type) -> None:
    model = nn.Sequential(kind(5, 2, max_norm=0.5))
    if world.size > 1:
        with pytest.raises(UsageError, match=r"0 has max_norm=0\.5.*renorm_\(2, 0, 0\.5\)"):
            unisono.parallel(model, world)
    unisono.parallel(model, world, unisono.LocalSGD(), torch.optim.SGD(model.parameters(), 0.1))
    unisono.parallel(nn.Sequential(nn.Linear(2, 2), kind(5, 2, max_norm=0.5).requires_grad_(False)), world)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_a_graph_of_gradients_is_refused_where_it_would_be_cut(world: World) -> None:
    model = nn.Linear(4, 2)
    unisono.parallel(model, world, CHAIN)
    loss = model(torch.ones(2, 4)).square().sum()
    with unisono.no_sync(model):
        loss.backward(create_graph=True)
    assert model.weight.grad.requires_grad
    model.zero_grad()
    if world.size > 1:
        with pytest.raises(UsageError, match=r"parameter \w+ has a gradient with a graph.*autograd\.grad"):
            loss.backward(create_graph=True)
    step(model, world)
    own = nn.Linear(4, 2)
    unisono.parallel(own, world, unisono.LocalSGD(), torch.optim.SGD(own.parameters(), 0.1))
    own(torch.ones(2, 4)).square().sum().backward(create_graph=True)
    assert own.weight.grad.requires_grad
    own.zero_grad()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_scalar_and_empty_parameters(group: World, dtype: torch.dtype) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.complex = nn.Parameter(torch.randn(4, 3, dtype=dtype).t())
            self.scalar = nn.Parameter(torch.tensor(2.0))
            self.empty = nn.Parameter(torch.empty(0, 3))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            turned = (self.complex @ inputs.T.to(dtype)).abs().to(inputs.dtype)
            return turned * self.scalar + self.empty.sum()

    torch.manual_seed(0)
    model = unisono.parallel(Mixed(), group, CHAIN)
    step(model, group)
    assert model.complex.grad.dtype == dtype and model.complex.grad.abs().min() > 0
    assert model.scalar.grad.shape == () and model.scalar.grad != 0
    assert model.empty.grad.shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types(group: World, dtype: torch.dtype) -> None:
    step_in = unisono.parallel(nn.Linear(4, 4).to(dtype), group, CHAIN)
    step_in(torch.ones(2, 4, dtype=dtype)).sum().backward()
    assert torch.equal(step_in.weight.grad, torch.full((4, 4), 2.0, dtype=dtype))


def test_a_freed_world(world: World) -> None:
    group = world.split(0)
    tensor = group.empty(1000, torch.float32)
    model = unisono.parallel(nn.Linear(4, 4), group, CHAIN)
    step(model, group)
    tensor.fill_(3)
    group.barrier()
    kept, array, part = model.weight.grad, tensor.numpy(), tensor[10:20]
    was = kept.clone()
    group.free()
    group.free()
    assert tensor.sum() == 3000
    assert array.sum() == 3000
    assert part.add_(1).tolist() == [4.0] * 10
    assert torch.equal(kept, was)
    calls: list[Callable[[], object]] = [
        lambda: group.allreduce(torch.ones(2)),
        lambda: group.broadcast(torch.ones(2)),
        group.barrier,
        group.dup,
        lambda: group.split(0),
        lambda: group.empty(3, torch.float32),
        lambda: group.all_gather_object(1),
        lambda: group.call_on_root(lambda: 1),
        lambda: unisono.parallel(nn.Linear(2, 2), group),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="has been freed"):
            call()
    model.zero_grad()
    model(torch.ones(2, 4)).sum().backward()  # a model like any other
    assert torch.equal(model.weight.grad, torch.full((4, 4), 2.0))
    step(unisono.parallel(model, world, CHAIN), world)


def test_worlds_of_models_are_created_and_freed(world: World) -> None:
    before = None
    for _ in range(5):
        group = world.split(0)
        model = unisono.parallel(nn.Linear(30, 30), group, BSP(overlap="concurrent"))
        model(torch.ones(2, 30)).sum().backward()
        del model
        group.free()
        before = before or held()
        assert settles(lambda before=before: not grown(before)), (held(), before)


def test_memory_outlives_the_tensor_that_it_was_given_as(world: World) -> None:
    part = world.empty(1000, torch.float32)[100:200]
    part.fill_(world.rank)
    world.allreduce(part)
    assert part.tolist() == [float(sum(range(world.size)))] * 100
    count = held()[1]
    del part
    assert settles(lambda: held()[1] < count or world.size == 1)
    assert not list(Path("/dev/shm").glob(f"*{os.getpid()}*unisono*"))
