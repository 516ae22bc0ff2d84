"""Sharded updates on real ranks: the weights of BSP, a share of the state, and the ends of a loop of one's own."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.mpi.reducer.shares import batches
from torch import nn

import unisono
from unisono.errors import MismatchError, UsageError
from unisono.optimizers import LAMB, LARS
from unisono.optimizers.sharded import ELEMENTWISE, Segment
from unisono.step.overlaps import OVERLAPS
from unisono.world import World

SMALL = unisono.Exchange(bucket_bytes=20_000)

Optimizers = Callable[[nn.Module], torch.optim.Optimizer]


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(64, 50), nn.Tanh(), nn.BatchNorm1d(50), nn.Linear(50, 10)]
    model = nn.Sequential(*layers).double()
    model.register_parameter("unused", nn.Parameter(torch.ones(3, dtype=torch.float64)))
    return model


def groups(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Layers decay; norms and biases do not, and learn at another rate."""
    parameters = list(model.parameters())
    return [
        {"params": [parameter for parameter in parameters if parameter.ndim > 1], "weight_decay": decay},
        {"params": [parameter for parameter in parameters if parameter.ndim <= 1], "weight_decay": 0.0, "lr": 0.02},
    ]


def test_a_model_may_be_laid_out_anew(world: World) -> None:
    """Its shards, and the state in them, stay in the order of the beginning."""
    start, inputs = nn.Conv2d(3, 4, 3).double(), torch.ones(2, 3, 8, 8, dtype=torch.float64).cumsum(1)
    results = []
    for rule in (unisono.Sharded(), unisono.BSP()):
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        unisono.parallel(model, world, rule, optimizer)
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        for _ in range(4):  # the search lays out other buckets
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        results.append((model.weight.detach(), optimizer.state_dict()["state"][0]["momentum_buffer"]))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kinds", [(torch.optim.SGD, LAMB), (LAMB, torch.optim.SGD)], ids=["then LAMB", "then SGD"])
def test_an_optimizer_that_measures_layers_follows_one_that_does_not(world: World, kinds: Sequence[Any]) -> None:
    model = network()
    for kind in kinds:
        trainer = unisono.Trainer(model, world, unisono.Sharded(), kind(model.parameters(), lr=0.1))
        for inputs, labels in batches(world, 1, 12):
            trainer.step(inputs.double(), labels)
        trainer.wait()


def test_norms_of_halves_are_summed_in_float32(world: World) -> None:
    model = nn.Linear(100, 100, bias=False).half()
    nn.init.constant_(model.weight, 30_000)  # the norm is 3,000,000
    optimizer = LAMB(model.parameters(), 0.1)
    unisono.parallel(model, world, unisono.Sharded(), optimizer)
    model.weight.sum().backward()
    optimizer.step()
    assert model.weight.isfinite().all()
    assert model.weight.lt(30_000).all()


OPTIMIZERS: dict[str, Optimizers] = {
    "momentum": lambda model: torch.optim.SGD(groups(model, 1e-3), 0.1, momentum=0.9),
    "adam": lambda model: torch.optim.Adam(groups(model, 1e-3), 0.01),
    "adamw": lambda model: torch.optim.AdamW(groups(model, 0.1), 0.01),
    "lars": lambda model: LARS(groups(model, 1e-3), 0.5, trust=0.02),
    "lamb": lambda model: LAMB(groups(model, 0.01), 0.01),
}


def close(model: nn.Module, expected: nn.Module, tolerance: float = 1e-9) -> None:
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected.state_dict()[name], rtol=0, atol=tolerance, msg=name)


def same(world: World, model: nn.Module) -> bool:
    """Whether all ranks have the same bits."""
    bits = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return len(set(world.all_gather_object(bits))) == 1


def trained(
    world: World, rule: unisono.BSP, name: str, steps: int = 50, clip: float | None = None
) -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    """A model after some steps of a Trainer: ranks have unequal shares of 13 samples."""
    model = network()
    optimizer = OPTIMIZERS[name](model)
    trainer = unisono.Trainer(model, world, rule, optimizer, clip=clip)
    losses = []
    for inputs, labels in batches(world, steps, 13):
        losses.append(sum(world.all_gather_object(trainer.step(inputs.double(), labels))))
    trainer.wait()
    return model, optimizer, losses


@pytest.mark.parametrize("name", ["adam", "lars"])
def test_losses_are_those_of_bsp(group: World, name: str) -> None:
    """50 steps, with a search of the first ones: buckets change, and the state moves between ranks."""
    model, _, losses = trained(group, unisono.Sharded(), name, clip=0.5)
    plain, _, expected = trained(group, unisono.BSP(SMALL, "none"), name, clip=0.5)
    assert losses == pytest.approx(expected, abs=1e-9)
    close(model, plain)
    assert same(group, model)


@pytest.mark.parametrize(
    ("where", "overlap"), [*(("group", name) for name in OVERLAPS), ("spread", "chain"), ("spread", "funnel")]
)
def test_all_overlaps_on_one_node_and_on_two(overlap: str, where: str, request: pytest.FixtureRequest) -> None:
    world: World = request.getfixturevalue(where)
    model, _, _ = trained(world, unisono.Sharded(SMALL, overlap), "adam", 4)
    plain, _, _ = trained(world, unisono.BSP(SMALL, overlap), "adam", 4)
    close(model, plain)
    assert same(world, model)


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
def test_a_wire_rounds_gradients(spread: World, wire: str) -> None:
    """Between nodes; on one node, or with one rank, nothing is encoded."""
    model, _, _ = trained(spread, unisono.Sharded(unisono.Exchange(wire=wire, bucket_bytes=20_000)), "momentum", 12)
    plain, _, _ = trained(spread, unisono.BSP(SMALL), "momentum", 12)
    assert same(spread, model)
    close(model, plain, 0.02)
    if spread.nodes > 1:
        assert not torch.equal(model[1].weight, plain[1].weight)


def nbytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of an optimizer's state."""
    states = optimizer.state.values()
    return sum(tensor.nbytes for state in states for tensor in state.values() if isinstance(tensor, torch.Tensor))


def test_each_rank_has_its_share_of_the_state(group: World) -> None:
    """With 4 ranks at most 0.26 of the whole."""
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Flatten(), nn.Linear(64, 600), nn.Tanh(), nn.Linear(600, 10))
    plain = copy.deepcopy(wide)
    for model, rule in ((wide, unisono.Sharded()), (plain, unisono.BSP())):
        optimizer = torch.optim.Adam(model.parameters())
        trainer = unisono.Trainer(model, group, rule, optimizer)
        for inputs, labels in batches(group, 3):
            trainer.step(inputs, labels)
        trainer.wait()
        size = nbytes(optimizer)
        if isinstance(rule, unisono.Sharded):
            assert all(isinstance(key, Segment) for key in optimizer.state)
            share = size
    assert sum(group.all_gather_object(share)) <= size + 4 * group.size * 4 * len(list(wide.parameters()))
    assert share <= size * (1 / group.size + 0.01)


@pytest.mark.parametrize("name", ["momentum", "adamw", "lamb"])
def test_a_loop_of_ones_own(group: World, name: str) -> None:
    """Accumulation, a rank without a batch, samples, a schedule, clipping by the rule; evaluation between."""

    def run(rule: unisono.BSP, clip: float | None) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = network()
        optimizer = OPTIMIZERS[name](model)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        unisono.parallel(model, group, rule, optimizer if isinstance(rule, unisono.Sharded) else None)
        shares = list(batches(group, 24, 13))
        for step in range(12):
            optimizer.zero_grad()
            (first, its_labels), (second, labels) = shares[2 * step : 2 * step + 2]
            if step % 4 == 3 and group.size > 1 and group.rank == 0:
                unisono.add_samples(model, 0)
                unisono.synchronize(model)
            else:
                with unisono.no_sync(model):
                    unisono.add_samples(model, len(its_labels))
                    nn.functional.cross_entropy(model(first.double()), its_labels).backward()
                unisono.add_samples(model, len(labels))
                nn.functional.cross_entropy(model(second.double()), labels).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            schedule.step()
            model.eval()
            with torch.no_grad():
                model(shares[0][0].double())
            model.train()
        return model, optimizer

    model, optimizer = run(unisono.Sharded(SMALL, clip=0.3), None)
    plain, other = run(unisono.BSP(SMALL), 0.3)
    close(model, plain)
    assert same(group, model)
    mine, its = optimizer.state_dict(), other.state_dict()
    assert mine["param_groups"] == its["param_groups"]
    assert mine["state"].keys() == its["state"].keys()
    for index, state in its["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(mine["state"][index][key], value, rtol=0, atol=1e-9)
            assert mine["state"][index][key].shape == value.shape


def test_gradients_in_shards_cannot_be_read(group: World) -> None:
    model = network()
    optimizer = OPTIMIZERS["adam"](model)
    unisono.parallel(model, group, unisono.Sharded(SMALL), optimizer)
    inputs, labels = next(batches(group, 1, 13))

    def backward() -> None:
        nn.functional.cross_entropy(model(inputs.double()), labels).backward()

    backward()
    with pytest.raises(UsageError, match=r"which Sharded has summed in shards.*clip with unisono.Sharded\(clip=...\)"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    with pytest.raises(UsageError, match="which Sharded has summed in shards"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.zero_grad()
    backward()
    before = model[1].weight.detach().clone()
    optimizer.zero_grad()
    backward()  # the step of the backward pass before was left out, on all ranks
    assert torch.equal(model[1].weight, before)
    optimizer.step()
    assert not torch.equal(model[1].weight, before)
    assert same(group, model)


def test_a_step_that_a_rank_leaves_out_is_made_on_none(group: World) -> None:
    """Weights and state stay as they are, and training can go on."""
    model, plain = network(), network()
    optimizer, other = (OPTIMIZERS["momentum"](module) for module in (model, plain))
    unisono.parallel(model, group, unisono.Sharded(SMALL), optimizer)
    unisono.parallel(plain, group, unisono.BSP(SMALL))
    for step, (inputs, labels) in enumerate(batches(group, 5, 13)):

        def backward(module: nn.Module, inputs: torch.Tensor = inputs, labels: torch.Tensor = labels) -> None:
            nn.functional.cross_entropy(module(inputs.double()), labels).backward()

        for module, its in ((model, optimizer), (plain, other)):
            its.zero_grad()
            backward(module)
            if step != 1 or group.size == 1:
                its.step()
            elif module is model:
                with pytest.raises(MismatchError, match=r"rank 0 of \d has left out .* no weight was changed"):
                    its.step() if group.rank else backward(module)  # which ends the step that the others have begun
    for mine, its_own in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, its_own, rtol=0, atol=1e-9)
    for index, state in other.state_dict()["state"].items():
        actual = optimizer.state_dict()["state"][index]
        for name, value in state.items():
            torch.testing.assert_close(actual[name], value, rtol=0, atol=1e-9)


def test_a_rank_without_a_batch_has_no_gradients_in_its_zeros(group: World) -> None:
    """`zero_grad(set_to_none=False)`, then `synchronize`: its weight in the average is 0."""
    made = []
    for rule in (unisono.Sharded(SMALL), unisono.BSP(SMALL)):
        model = network()
        optimizer = OPTIMIZERS["adam"](model)
        unisono.parallel(model, group, rule, optimizer)
        for step, (inputs, labels) in enumerate(batches(group, 4, 13)):
            optimizer.zero_grad(set_to_none=False)
            if step == 2 and group.size > 1 and group.rank == 0:
                unisono.synchronize(model)
            else:
                nn.functional.cross_entropy(model(inputs.double()), labels).backward()
            optimizer.step()
        made.append(model)
    close(*made)


@pytest.mark.parametrize("kept", ["of an earlier pass", "of another parameter"])
def test_a_placeholder_is_of_its_pass_and_parameter(group: World, kept: str) -> None:
    """The gradients of a pass are gone after the next one, also where the program has put `.grad` away and back."""
    model = network()
    optimizer = OPTIMIZERS["adam"](model)
    unisono.parallel(model, group, unisono.Sharded(SMALL), optimizer)
    before = copy.deepcopy(model.state_dict())
    inputs, labels = next(batches(group, 1, 13))
    nn.functional.cross_entropy(model(inputs.double()), labels).backward()
    if kept == "of an earlier pass":
        gradient = model[1].weight.grad
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs.double()), labels).backward()
        model[1].weight.grad = gradient
        name = "1.weight"
    else:
        model[3].weight.grad = model[3].bias.grad
        name = "3.weight"
    with pytest.raises(UsageError, match=f"parameter {name} has a gradient in .grad that Sharded has not summed"):
        optimizer.step()
    for key in ("1.weight", "3.weight", "3.bias"):
        assert torch.equal(model.state_dict()[key], before[key])


def test_a_parameter_of_no_parallel_model_is_not_updated(group: World) -> None:
    model, other = network(), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*model.parameters(), other], 0.1)
    unisono.parallel(model, group, unisono.Sharded(SMALL), optimizer)
    before = copy.deepcopy(list(model.parameters()))
    inputs, labels = next(batches(group, 1, 13))
    (nn.functional.cross_entropy(model(inputs.double()), labels) * other.sum()).backward()
    with pytest.raises(UsageError, match=r"of shape \(3,\) that is not the model's, .* into one torch.nn.ModuleDict"):
        optimizer.step()
    assert torch.equal(other, torch.ones(3))
    assert all(map(torch.equal, model.parameters(), before))


def test_a_copy_of_the_optimizer_has_the_whole_state(group: World) -> None:
    model = network()
    optimizer = OPTIMIZERS["adam"](model)
    unisono.parallel(model, group, unisono.Sharded(SMALL), optimizer)
    inputs, labels = next(batches(group, 1, 13))
    nn.functional.cross_entropy(model(inputs.double()), labels).backward()
    optimizer.step()
    expected = optimizer.state_dict()["state"]
    copied = copy.deepcopy(optimizer).state_dict()["state"]
    assert copied.keys() == expected.keys() != set()
    for index, state in expected.items():
        assert all(torch.equal(value, copied[index][name]) for name, value in state.items())


@pytest.mark.parametrize("name", ["momentum", "lamb"])
def test_a_layer_is_unfrozen_and_the_model_made_parallel_again(group: World, name: str) -> None:
    """With the same optimizer, which keeps its state."""
    made = []
    for rule in (unisono.Sharded(SMALL), unisono.BSP(SMALL)):
        model = network()
        optimizer = OPTIMIZERS[name](model)
        for step, (inputs, labels) in enumerate(batches(group, 6, 13)):
            if step in (0, 3):
                model[1].requires_grad_(step == 3)
                unisono.parallel(model, group, rule, optimizer)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs.double()), labels).backward()
            optimizer.step()
        made.append((model, optimizer.state_dict()["state"]))
    (model, mine), (plain, its) = made
    close(model, plain)
    assert mine.keys() == its.keys()
    for index, state in its.items():
        for key, value in state.items():
            torch.testing.assert_close(mine[index][key], value, rtol=0, atol=1e-9)


def test_a_step_with_a_closure(group: World) -> None:
    model, plain = network(), network()
    for module, rule in ((model, unisono.Sharded(SMALL)), (plain, unisono.BSP(SMALL))):
        optimizer = OPTIMIZERS["adam"](module)
        unisono.parallel(module, group, rule, optimizer if isinstance(rule, unisono.Sharded) else None)
        for inputs, labels in batches(group, 3, 13):

            def closure(
                module: nn.Module = module,
                optimizer: torch.optim.Optimizer = optimizer,
                inputs: torch.Tensor = inputs,
                labels: torch.Tensor = labels,
            ) -> torch.Tensor:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(module(inputs.double()), labels)
                loss.backward()
                return loss

            optimizer.step(closure)
    close(model, plain)


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_optimizers_of_pytorch(group: World, kind: type[torch.optim.Optimizer]) -> None:
    """Also those that make their state when they are made; half of the steps after a resume."""

    def run(rule: unisono.BSP) -> nn.Module:
        model = network()
        state: tuple[Any, Any] | None = None
        for part in range(2):
            optimizer = kind(model.parameters(), lr=0.01)  # type: ignore[call-arg]
            trainer = unisono.Trainer(model, group, rule, optimizer)
            if state is not None:
                model.load_state_dict(state[0])
                optimizer.load_state_dict(state[1])
            for inputs, labels in list(batches(group, 6, 13))[3 * part : 3 * part + 3]:
                trainer.step(inputs.double(), labels)
            state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            model = network()
        model.load_state_dict(state[0])
        return model

    close(run(unisono.Sharded(SMALL)), run(unisono.BSP(SMALL)))


def test_other_layouts_and_dtypes(group: World) -> None:
    """Channels last, float32 and complex parameters beside each other, a parameter of no dimension."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.conv = nn.Conv2d(3, 8, 3).double().to(memory_format=torch.channels_last)
            self.turn = nn.Parameter(torch.randn(7, dtype=torch.complex128))
            self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
            self.last = nn.Linear(8, 2)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = self.conv(inputs).mean((2, 3)) * self.scale
            return self.last(hidden.float()).sum() + (self.turn * hidden.sum()).abs().sum()

    made = []
    for rule in (unisono.Sharded(unisono.Exchange(bucket_bytes=300)), unisono.BSP()):
        model = Mixed()
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        trainer = unisono.Trainer(model, group, rule, optimizer, loss=lambda out, _: out)
        for step in range(6):
            generator = torch.Generator().manual_seed(10 * step + group.rank)
            trainer.step(torch.randn(2, 3, 5, 5, generator=generator, dtype=torch.float64), torch.zeros(2))
        made.append((model, optimizer.state_dict()))
    (model, mine), (plain, its) = made
    close(model, plain, 1e-5)
    for index, state in its["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(mine["state"][index][key], value, rtol=1e-4, atol=1e-6)
            assert mine["state"][index][key].stride() == value.stride()


def test_a_released_optimizer_is_refused(world: World) -> None:
    group = world.split(0)
    model = network()
    optimizer = OPTIMIZERS["adam"](model)
    trainer = unisono.Trainer(model, group, unisono.Sharded(SMALL), optimizer)
    for inputs, labels in batches(group, 2, 13):
        trainer.step(inputs.double(), labels)
    state = optimizer.state_dict()
    group.free()
    for use in (optimizer.step, optimizer.state_dict):
        with pytest.raises(UsageError, match="make a new one, and load the state_dict"):
            use()
    fresh = OPTIMIZERS["adam"](model)
    fresh.load_state_dict(state)
    assert nbytes(fresh) > 0


def test_shards_are_no_state_once_the_model_is_gone(group: World) -> None:
    model = network()
    optimizer = OPTIMIZERS["adam"](model)
    trainer = unisono.Trainer(model, group, unisono.Sharded(SMALL), optimizer)
    for inputs, labels in batches(group, 1, 13):
        trainer.step(inputs.double(), labels)
    trainer.wait()
    del trainer, model
    gc.collect()
    with pytest.raises(UsageError, match="make a new one, and load the state_dict"):
        optimizer.state_dict()


def test_a_released_optimizer_without_state_says_so_too(world: World) -> None:
    group, model = world.split(0), network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    unisono.parallel(model, group, unisono.Sharded(SMALL), optimizer)
    group.free()
    again = world.split(0)
    with pytest.raises(UsageError, match="make a new one, and load the state_dict"):
        unisono.parallel(model, again, unisono.Sharded(SMALL), optimizer)
    again.free()


class Muon(torch.optim.SGD):
    """An optimizer that nobody has looked at."""


def test_what_cannot_be_sharded_is_refused(group: World) -> None:
    model = network()
    with pytest.raises(UsageError, match=r"Sharded updates shards .*unisono.parallel\(model, world, rule, optimizer\)"):
        unisono.parallel(model, group, unisono.Sharded())
    with pytest.raises(UsageError, match=r"Muon is not known to update each element by itself: use unisono.BSP\(\)"):
        unisono.parallel(model, group, unisono.Sharded(), Muon(model.parameters(), 0.1))
    hooked = torch.optim.SGD(model.parameters(), 0.1)
    hooked.register_step_pre_hook(lambda *_: None)
    with pytest.raises(UsageError, match="SGD has hooks on its step, which would see no gradients"):
        unisono.parallel(model, group, unisono.Sharded(), hooked)
