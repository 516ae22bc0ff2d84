"""The same bits for any number of ranks: each number up to that of all ranks trains, and so do other settings."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from tests.rules.gossip import Gossip
from torch import nn

import unisono
from unisono.data.builtin import load_digits
from unisono.device import PIECE_BYTES
from unisono.errors import UnisonoError, UsageError
from unisono.optimizers.layerwise import LAMB, LARS
from unisono.reducer import reducer_of
from unisono.rules import BaseRule
from unisono.step.overlaps import OVERLAPS
from unisono.step.program import bucket, weights
from unisono.training.trainer import Trainer
from unisono.world import World

SHARES = 8
SIZES = (64, 29, 5, 64, 1, 64)
"""Samples of each batch: in some a share is smaller than another, or empty."""


@contextmanager
def groups_of(world: World, ranks: int) -> Iterator[World]:
    """Groups of so many ranks, and one of the rest; freed at the end."""
    group = world.split(world.rank // ranks)
    yield group
    group.free()


def net() -> nn.Module:
    """A small network with batch norm and dropout, and a layer that buckets cut."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(144, 61),
        nn.Dropout(0.3),
        nn.ReLU(),
        nn.Linear(61, 10),
    )


def digest(model: nn.Module) -> str:
    """Hash of all weights and buffers."""
    state = model.state_dict().values()
    return hashlib.sha256(b"".join(tensor.contiguous().numpy().tobytes() for tensor in state)).hexdigest()


def batches(model: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """This rank's samples of each batch, and the number of all ranks' samples."""
    data, order = load_digits().train, torch.randperm(1437, generator=torch.Generator().manual_seed(1))
    for index, size in enumerate(SIZES):
        mine = unisono.own_samples(model, size)
        rows = order[64 * index :][mine.start : mine.stop]
        yield data.inputs[rows], data.labels[rows], size


def trained(world: World, rule: unisono.BSP | unisono.Sharded, adam: bool = False, shares: int = SHARES) -> str:
    """Hash after the steps of a Trainer, the same on all ranks."""
    model = net()
    make = torch.optim.AdamW if adam else torch.optim.SGD
    optimizer = make(model.parameters(), 0.01, weight_decay=1e-3)
    trainer = Trainer(model, world, rule, optimizer, virtual_ranks=shares)
    for inputs, labels, total in batches(model):
        trainer.step(inputs, labels, total)
    trainer.wait()
    (common,) = set(world.all_gather_object(digest(model)))
    return common


def rule_of(
    kind: type, algorithm: str = "auto", nbytes: int | None = None, overlap: str = "chain", **own: str
) -> unisono.BSP:
    return kind(unisono.Exchange(algorithm, "exact", nbytes), overlap, **own)


@pytest.mark.parametrize("adam", [False, True])
def test_any_number_of_ranks_has_the_bits_of_one(world: World, adam: bool) -> None:
    """Rank 0's group has 1 to all ranks, and each has another schedule, size of buckets and overlap."""
    others = [
        rule_of(unisono.BSP, overlap="none"),
        rule_of(unisono.BSP, "ring", 3000, "concurrent"),
        rule_of(unisono.Sharded, "direct", 7000, "chain"),
        rule_of(unisono.Sharded, "library", None, "funnel"),
    ]
    digests = set()
    for ranks in range(1, world.size + 1):
        with groups_of(world, ranks) as group:
            digests |= {trained(group, rule_of(unisono.BSP), adam), trained(group, others[ranks % 4], adam)}
    assert len(set().union(*world.all_gather_object(digests))) == 1


@pytest.mark.parametrize("optimizer", ["sgd", "lars", "lamb"])
def test_norms_of_shards_have_the_bits_of_any_number_of_ranks(world: World, optimizer: str) -> None:
    """Shards are cut elsewhere on each number of ranks, and the squares of layers with them."""
    make = {"sgd": torch.optim.SGD, "lars": LARS, "lamb": LAMB}[optimizer]
    digests = set()
    for ranks in range(1, world.size + 1):
        with groups_of(world, ranks) as group:
            model = net()
            rule = unisono.Sharded(unisono.Exchange(bucket_bytes=7000 * ranks), clip=0.05)
            unisono.parallel(model, group, rule, steps := make(model.parameters(), 0.1), virtual_ranks=SHARES)
            for inputs, labels, total in batches(model):
                for some, targets in unisono.shares(model, inputs, labels, whole=total):
                    nn.functional.cross_entropy(model(some), targets).backward()
                steps.step()
            digests.add(group.call_on_root(lambda model=model: digest(model)))
    assert len(set().union(*world.all_gather_object(digests))) == 1


@pytest.mark.parametrize("kind", [unisono.BSP, unisono.Sharded])
def test_settings_change_no_bit(spread: World, kind: type) -> None:
    """Between two nodes, and by MPI's own sum."""
    rules = [rule_of(kind, algorithm, nbytes, overlap) for algorithm, nbytes, overlap in (
        ("auto", None, "auto"),
        ("ring", 2000, "chain"),
        ("library", 4000, "concurrent"),
        ("halving" if kind is unisono.BSP else "ring", 20_000, "funnel"),
        ("direct", 20_000, "none"),
    )]  # fmt: skip
    assert len({trained(spread, rule) for rule in rules}) == 1


def test_a_loop_of_ones_own_has_the_bits_of_a_trainer(world: World) -> None:
    model, rows = net(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.01, weight_decay=1e-3)
    unisono.parallel(model, world, virtual_ranks=SHARES)
    loss = nn.CrossEntropyLoss()
    for inputs, labels, total in batches(model):
        state = torch.get_rng_state()
        for some, targets in unisono.shares(model, inputs, labels, whole=total):
            rows.append(len(targets))
            loss(model(some), targets).backward()
        assert torch.get_rng_state().equal(state), "the program's own numbers go on"
        optimizer.step()
    assert sum(world.all_gather_object(sum(rows))) == sum(SIZES)
    own = world.call_on_root(lambda: digest(model))
    assert own == trained(world, rule_of(unisono.BSP))


def test_a_rank_without_samples_leaves_the_last_gradients(world: World) -> None:
    """The update of the step before, which is late, has yet to read them."""
    digests = set()
    for late in (False, True):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        trainer = Trainer(model, world, rule_of(unisono.BSP), optimizer, virtual_ranks=SHARES)
        player = trainer.reducer.programs.player
        for index, (inputs, labels, total) in enumerate(batches(model)):
            if late and SIZES[index + 1 : index + 2] == (1,):
                player.engine.push(partial(time.sleep, 0.3), [player.variable(weights(each)) for each in range(8)])
            trainer.step(inputs, labels, total)
            player.wait(*map(bucket, trainer.reducer.memory.keys))  # gradients are set
        trainer.wait()
        digests.add(digest(model))
    assert len(digests) == 1


def test_a_sum_over_shares(world: World) -> None:
    """The sum of the shares' means is V times the mean of equal shares, up to the last bits."""
    grads = []
    for scale in ("mean", "sum"):
        model = net()
        unisono.parallel(model, world, unisono.BSP(scale=scale), virtual_ranks=SHARES)
        inputs, labels, batch_size = next(batches(model))
        for some, targets in unisono.shares(model, inputs, labels, whole=batch_size):
            nn.functional.cross_entropy(model(some), targets).backward()
        grads.append([parameter.grad.clone() for parameter in model.parameters()])
    for mean, total in zip(*grads, strict=True):
        torch.testing.assert_close(total, SHARES * mean, rtol=1e-5, atol=1e-6)


def test_without_virtual_ranks_no_setting_changes_a_bit(spread: World) -> None:
    """The wire alone: ranks are the shares."""
    digests = set()
    for algorithm, nbytes, overlap in (("ring", 2000, "chain"), ("library", None, "none"), ("direct", 9000, "funnel")):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        trainer = Trainer(model, spread, rule_of(unisono.BSP, algorithm, nbytes, overlap), optimizer)
        data = load_digits().train
        for step in range(4):
            rows = slice(16 * (step * spread.size + spread.rank), 16 * (step * spread.size + spread.rank + 1))
            torch.manual_seed(step)
            trainer.step(data.inputs[rows], data.labels[rows])
        trainer.wait()
        digests.add(digest(model))
    assert len(digests) == 1


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_the_average_is_that_of_floats_up_to_the_last_bits(world: World, overlap: str) -> None:
    model, serial = net(), net()
    unisono.parallel(model, world, unisono.BSP(overlap=overlap), virtual_ranks=SHARES)
    for layer in (*model, *serial):
        layer.eval()  # so that shares are the batch
    inputs, labels, total = next(batches(model))
    for some, targets in unisono.shares(model, inputs, labels, whole=total):
        nn.functional.cross_entropy(model(some), targets).backward()
    everyone = world.all_gather_object((inputs, labels))
    inputs, labels = (torch.cat(parts) for parts in zip(*everyone, strict=True))
    nn.functional.cross_entropy(serial(inputs), labels).backward()
    for own, other in zip(model.parameters(), serial.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-7)


def test_sums_of_a_world_have_the_bits_of_any_algorithm(spread: World) -> None:
    own = torch.randn(3001, generator=torch.Generator().manual_seed(spread.rank))
    sums = {spread.allreduce(own.clone(), name, "exact").numpy().tobytes() for name in ("ring", "direct", "library")}
    assert len(sums) == 1
    full = spread.allreduce(own.clone(), wire="exact")
    first = 3001 * spread.rank // spread.size
    part = spread.reduce_scatter(own, "ring", "exact")
    assert part.equal(full[first : first + len(part)])
    torch.testing.assert_close(full, spread.allreduce(own.clone()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1, 255, 257, 1000, 70_001, 300_000])
def test_sums_in_memory_have_the_bits_of_messages(world: World, dtype: torch.dtype, length: int) -> None:
    """Within a node no rank agrees on exponents: each sums whole blocks of all ranks."""
    own = torch.randn(length, generator=torch.Generator().manual_seed(length + world.rank)).to(dtype)
    own[length // 3 * world.rank :][:1] = torch.inf if length % 5 else torch.nan
    expected = world.allreduce(own.clone(), "ring", "exact")
    shared = world.empty(length, dtype)
    for memory in (shared, torch.empty(length, dtype=dtype)):
        for _ in range(4):  # programs of all slots
            summed = world.allreduce(memory.copy_(own), wire="exact")
            assert summed.numpy().tobytes() == expected.numpy().tobytes()


def with_sgd(model: nn.Module, world: World, rule: BaseRule) -> nn.Module:
    return unisono.parallel(model, world, rule, torch.optim.SGD(model.parameters(), 0.1))


class Placing(nn.Module):
    """Layer with an operator whose result depends on the order of its writes."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.clone().put_(torch.zeros(2, dtype=torch.int64), inputs.flatten()[:2])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda world: unisono.parallel(net(), world, virtual_ranks=world.size - 1),
            "ranks, so some would have no share",
        ),
        (
            lambda world: unisono.parallel(net(), world, unisono.BSP(unisono.Exchange(wire="int8")), virtual_ranks=8),
            'virtual_ranks = 8, but the sums of wire "int8" depend on the ranks: use "exact"',
        ),
        (
            lambda world: unisono.parallel(net().bfloat16(), world, virtual_ranks=8),
            r'parameter 0.weight is torch.bfloat16, and the wire "exact" sums float32 and float64',
        ),
        (
            lambda world: trained(world, unisono.LocalSGD(unisono.Exchange(wire="exact"))),
            'LocalSGD does not sum by the wire "exact": use BSP or Sharded',
        ),
        (  # it would average weights as if they were exact sums
            lambda world: with_sgd(net(), world, Gossip(unisono.Exchange(wire="exact"))),
            'Gossip does not sum by the wire "exact"',
        ),
    ],
)
def test_what_cannot_have_the_same_bits_is_refused(world: World, make: Callable[[World], object], message: str) -> None:
    if world.size == 1 and "no share" in message:
        pytest.skip("0 are none")
    with pytest.raises(UnisonoError, match=message):
        make(world)


def test_samples_that_do_not_fit_and_operators_that_are_not_deterministic_are_refused(world: World) -> None:
    model = net()
    with pytest.raises(UsageError, match="the model is not parallel"):
        unisono.own_samples(model, 64)
    unisono.parallel(model, world)
    with pytest.raises(UsageError, match=r"the model has no virtual ranks: call unisono\.parallel"):
        unisono.shares(model, torch.zeros(8))
    shares = 2 * world.size
    model = nn.Sequential(Placing(), nn.Linear(4, 4))
    trainer = Trainer(model, world, unisono.BSP(), torch.optim.SGD(model.parameters(), 0.1), virtual_ranks=shares)
    with pytest.raises(UsageError, match=r"rank .: 3 samples for 2 virtual ranks, which have equally many: give a"):
        trainer.step(torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(UsageError, match=r"rank .: 2 samples, but its virtual ranks have samples .* to"):
        trainer.step(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64), whole=4 * world.size)
    with pytest.raises(UsageError, match=r"and put_ is not deterministic: replace it in the model, or train without"):
        trainer.step(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_second_pass_of_a_share_sums_with_the_first_or_is_refused(world: World) -> None:
    model = unisono.parallel(nn.Linear(4, 3, bias=False), world, virtual_ranks=2 * world.size)
    for (inputs,) in unisono.shares(model, torch.ones(2, 4)):
        with unisono.no_sync(model):
            model(inputs).sum().backward()
        model(inputs).sum().backward()
        if model.weight.grad is not None:
            assert model.weight.grad.eq(2).all()
    with pytest.raises(UsageError, match="one backward pass that sums, and this is another: add the losses"):
        model(inputs).sum().backward()


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("skips", [lambda rank: rank == 0, lambda _: True])
def test_a_share_without_a_pass_is_refused_on_all_ranks(
    world: World, skips: Callable[[int], bool], first: bool
) -> None:
    """The step after it is as any other."""
    model, inputs = nn.Linear(2, 1), torch.randn(SHARES, 2)
    unisono.parallel(model, world, virtual_ranks=SHARES)
    mine = unisono.own_samples(model, SHARES)

    def train(all_shares: bool) -> None:
        for place, (some,) in enumerate(unisono.shares(model, inputs[mine.start : mine.stop], whole=SHARES), 1):
            if place != (1 if first else len(mine)) or all_shares:
                model(some).sum().backward()

    who = "rank 0" if world.size == 1 or not skips(1) else f"{world.size} ranks"
    with pytest.raises(UsageError, match=f"no backward pass on {who}, .* call backward"):
        train(not skips(world.rank))
    train(all_shares=True)
    assert model.weight.grad is not None


def test_a_step_between_shares_and_rows_of_other_samples_are_refused(world: World) -> None:
    """Ranks would drift apart, and train on other labels."""
    model, inputs = nn.Linear(2, 1), torch.randn(2, 2)
    unisono.parallel(model, world, virtual_ranks=2 * world.size)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(
        UsageError, match=r"weights were changed in place between two shares of a batch: .* behind the loop over"
    ):
        for (some,) in unisono.shares(model, inputs):
            model(some).sum().backward()
            optimizer.step()
    with pytest.raises(UsageError, match=r"tensors of 2 and 3 samples: give the rows of unisono\.own_samples of each"):
        next(unisono.shares(model, inputs, torch.zeros(3, 1)))
    for (some,) in unisono.shares(model, inputs):
        model(some).sum().backward()
    optimizer.step()


def test_another_optimizer_comes_with_the_same_virtual_ranks(world: World) -> None:
    model, rule = net(), unisono.BSP()
    first, second = (torch.optim.SGD(model.parameters(), 0.1) for _ in range(2))
    unisono.parallel(model, world, rule, first, virtual_ranks=SHARES)
    for given in ({}, {"virtual_ranks": 2 * SHARES}, {"virtual_ranks": SHARES, "threads": 2}):
        with pytest.raises(UsageError, match="but the model is parallel with 8 and 1: pass the same"):
            unisono.parallel(model, world, rule, second, **given)
    unisono.parallel(model, world, rule, second, virtual_ranks=SHARES)
    with pytest.raises(UsageError, match=r"Trainer\(virtual_ranks=16\), but the model is parallel with .*=8"):
        Trainer(model, world, rule, second, virtual_ranks=2 * SHARES)
    assert Trainer(model, world, rule, second).reducer is Trainer(model, world, rule, second, virtual_ranks=8).reducer


class Assigns(nn.Module):
    """Layer that keeps its running mean by assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * inputs.detach().mean(0)
        return inputs - self.mean


def test_a_buffer_that_is_assigned_is_that_of_any_number_of_ranks(world: World) -> None:
    digests = set()
    for ranks in (1, world.size):
        with groups_of(world, ranks) as group:
            torch.manual_seed(0)
            model = unisono.parallel(nn.Sequential(Assigns(), nn.Linear(3, 2)), group, virtual_ranks=SHARES)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            mine = unisono.own_samples(model, 16)
            for step in range(3):
                inputs = torch.arange(48.0).add(step).sin().view(16, 3)[mine.start : mine.stop]
                for (some,) in unisono.shares(model, inputs, whole=16):
                    model(some).square().sum().backward()
                optimizer.step()
            virtual, before = reducer_of(model).programs.virtual, digest(model)
            virtual.recompute(model, (torch.ones(2, 3),), 0, 0, lambda some, model=model: model(some).sum().backward())
            assert digest(model) == before
            digests.add(before)
    assert len(set().union(*world.all_gather_object(digests))) == 1


def fail(*_: object) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("where", ["forward", "backward", "behind the sum"])
def test_a_batch_that_all_ranks_leave_out_leaves_the_bits_of_any_number_of_ranks(world: World, where: str) -> None:
    """In the first or the last share of each rank. A sum that was made stays."""
    digests = set()
    for ranks in (1, world.size):
        with groups_of(world, ranks) as group:
            model = unisono.parallel(net(), group, rule_of(unisono.BSP), virtual_ranks=SHARES)
            mine = unisono.own_samples(model, 16)
            for step in range(3):
                inputs = torch.arange(16 * 64.0).add(step).sin().view(16, 1, 8, 8)[mine.start : mine.stop]
                before = digest(model)
                try:
                    for place, (some,) in enumerate(unisono.shares(model, inputs, whole=16), 1):
                        loss, last = model(some).square().sum(), step == 1 and 2 * place == len(mine)
                        if step == 1 and where == "forward":
                            fail()
                        if last and where == "backward":
                            fails = model[0].weight.register_hook(fail)
                        loss.backward()
                        if last and where == "behind the sum":
                            break
                except ZeroDivisionError:
                    if where == "backward":
                        fails.remove()
                    assert digest(model) == before
                else:
                    assert digest(model) != before
            digests.add(digest(model))
    assert len(set().union(*world.all_gather_object(digests))) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sums_of_a_device_have_the_bits_of_the_host(world: World, device: torch.device, dtype: torch.dtype) -> None:
    """In pieces of whole blocks; of any strides, and in shards."""
    for shape in ((3, 100), (PIECE_BYTES // 2 + 77,)):
        own = torch.randn(shape, generator=torch.Generator().manual_seed(world.rank)).to(dtype).t()
        there = own.to(device)
        assert torch.equal(world.reduce_scatter(there, wire="exact").cpu(), world.reduce_scatter(own, wire="exact"))
        assert world.allreduce(there, wire="exact") is there
        assert torch.equal(there.cpu(), world.allreduce(own, wire="exact"))


@pytest.mark.parametrize("shares", [0, SHARES])
@pytest.mark.parametrize("rule", [unisono.BSP, unisono.Sharded])
def test_a_model_on_a_device_has_the_bits_of_one_on_the_host(
    world: World, pretend: Callable[[int], torch.device], rule: type[unisono.BSP], shares: int
) -> None:
    """Whatever streams run late; without virtual ranks, too. Buckets cut a layer."""

    def digest_on(device: torch.device) -> str:
        model = nn.Sequential(*(layer for layer in net() if not isinstance(layer, nn.Dropout))).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.9)
        trainer = Trainer(model, world, rule_of(rule, nbytes=1 << 12), optimizer, virtual_ranks=shares)
        draw = torch.Generator().manual_seed(world.rank)
        for size in (64, 60, 64):
            count = len(unisono.own_samples(model, size)) if shares else 20
            inputs, labels = torch.randn(count, 1, 8, 8, generator=draw), torch.arange(count) % 10
            trainer.step(inputs, labels, size if shares else None)
        trainer.wait()
        return digest(model.cpu())

    here = digest_on(torch.device("cpu"))
    for seed in range(3):
        assert digest_on(pretend(seed)) == here


def test_dropouts_on_a_device_follow_from_the_share(world: World, pretend: Callable[[int], torch.device]) -> None:
    """And what is drawn there later, or on another device, does not."""
    device, other = pretend(0), torch.device("pretend:1")
    later, weights = [], []
    for ranks in (1, world.size):
        group = world.split(world.rank // ranks)
        model = net().to(device)
        torch.manual_seed(world.rank)
        trainer = Trainer(model, group, unisono.BSP(), torch.optim.SGD(model.parameters(), 0.1), virtual_ranks=SHARES)
        mine = unisono.own_samples(model, 64)
        inputs = torch.arange(64 * 64.0).sin().view(64, 1, 8, 8)[mine.start : mine.stop]
        trainer.step(inputs, torch.arange(mine.start, mine.stop) % 10, 64)
        trainer.wait()
        later.append(torch.stack([torch.rand(4, device=place).cpu() for place in (device, other)]))
        weights.append(digest(model.cpu()))
        group.free()
    assert weights[0] == weights[1]
    torch.manual_seed(world.rank)
    expected = torch.stack([torch.rand(4, device=place).cpu() for place in (device, other)])
    assert all(drawn.equal(expected) for drawn in later)
