"""Collectives across nodes through sockets: results, and mistakes that all ranks are told of."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from unisono.collectives import socket_calls
from unisono.collectives.socket_calls import ANSWERS, FEW_ROUNDS, MAX_FLAT_BYTES, MAX_SHORT_BYTES, entry_of
from unisono.collectives.trials import keep_choice
from unisono.errors import MismatchError, TensorError, UsageError
from unisono.network.choice import ScheduleTable, parse_table
from unisono.placement import one_rank_per_node
from unisono.schedules.pieces import bounds
from unisono.transports import sockets
from unisono.transports.barriers import is_compiled
from unisono.wires import EXACT
from unisono.world import World

pytestmark = pytest.mark.skipif(not is_compiled(), reason="sockets are played by compiled code")


MISTAKES_MADE = int(os.environ.get("UNISONO_MISMATCHES", "4"))

DTYPES = ("float32", "float64", "bfloat16", "float16", "int64", "bool")


def make_apart(world: World, table: ScheduleTable | None = None) -> World:
    if world.size == 1:
        pytest.skip("one rank has no other to connect to")
    return World(world.comm.Dup(), one_rank_per_node(world.size), table or world.table)


@pytest.fixture
def apart(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """All ranks as if each sat on a node of its own, joined by sockets."""
    monkeypatch.setenv(sockets.VARIABLE, "on")
    monkeypatch.setattr(socket_calls, "read_choices", lambda _: {})  # whatever this machine has measured
    apart = make_apart(world)
    yield apart
    apart.free()


@pytest.fixture
def broken(differing: None, world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """The same, for ranks in different calls, after which nobody uses it."""
    monkeypatch.setenv(sockets.VARIABLE, "on")
    monkeypatch.setattr(socket_calls, "read_choices", lambda _: {})
    yield make_apart(world)
    world.barrier()


def transports_of(world: World) -> set[str]:
    return {plan.transport for plan in world._group.prepared}


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
@pytest.mark.parametrize("length", [0, 1, 60, 900, 6000])
def test_all_collectives(apart: World, dtype: torch.dtype, length: int) -> None:
    rank, ranks = apart.rank, apart.size

    def payload(other: int, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * other + step)
        return torch.randint(0, 5, (length,), generator=generator).to(dtype)

    for step in range(3):  # of which the later ones find what was prepared
        everyone = [payload(other, step) for other in range(ranks)]
        total = torch.stack(everyone).double().sum(0).to(dtype)
        own, root = slice(*bounds(length, ranks, rank)), (step + 1) % ranks
        assert torch.equal(apart.allreduce(payload(rank, step)), total)
        assert torch.equal(apart.allreduce(payload(rank, step), op="maximum"), torch.stack(everyone).amax(0))
        assert torch.equal(apart.broadcast(payload(rank, step), root), everyone[root])
        assert torch.equal(apart.reduce_scatter(payload(rank, step)), total[own])
        assert torch.equal(apart.all_gather(total[own].clone(), torch.empty_like(total)), total)
        reduced = payload(rank, step)
        apart.reduce(reduced, root)
        assert torch.equal(reduced, total if rank == root else everyone[rank])
        table = torch.arange(length * ranks).view(ranks, length) + 1_000_000 * rank
        expected = torch.stack([torch.arange(length) + length * rank + 1_000_000 * other for other in range(ranks)])
        assert torch.equal(apart.all_to_all(table), expected)
        apart.barrier()
    if length == 60:
        assert transports_of(apart) == {"sockets"}


@pytest.mark.parametrize("length", [MAX_SHORT_BYTES + 8, 700_001])
def test_long_collectives_go_in_segments_where_a_node_has_one_rank(apart: World, length: int) -> None:
    rank, ranks, numbers = apart.rank, apart.size, torch.arange(length, dtype=torch.float32) % 97
    total, own = numbers * sum(range(1, ranks + 1)), slice(*bounds(length, ranks, rank))
    for _ in range(3):
        for algorithm in ("auto", "ring", "halving", "direct", "circulant"):
            assert torch.equal(apart.allreduce(numbers * (rank + 1), algorithm), total)
        assert torch.equal(apart.reduce_scatter(numbers * (rank + 1)), total[own])
        assert torch.equal(apart.all_gather(total[own].clone(), torch.empty_like(total)), total)
    assert transports_of(apart) == {"sockets"}
    apart.allreduce(numbers.clone(), wire="bfloat16")
    assert torch.equal(apart.allreduce(numbers * (rank + 1), op="maximum"), numbers * ranks)
    assert transports_of(apart) == {"sockets", "messages"}, "wires and reductions in Python go by messages"


def test_a_tuned_table_chooses_what_messages_carry(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has timed no sockets: short payloads, and long ones of a root, take several times as long by messages."""
    monkeypatch.setenv(sockets.VARIABLE, "on")
    monkeypatch.setattr(socket_calls, "read_choices", lambda _: {})
    row = {"where": "across nodes", "algorithm": "tree", "transport": "messages"}
    table = parse_table({"allreduce": [row], "broadcast": [row], "all_to_all": [row | {"algorithm": "direct"}]}, "test")
    apart = make_apart(world, table)
    short, long = torch.ones(MAX_SHORT_BYTES // 4 // 12 * 12), torch.ones(2 * MAX_SHORT_BYTES // 4 // 12 * 12)
    calls: list[Callable[[torch.Tensor], object]] = [apart.allreduce, apart.broadcast, apart.reduce, apart.all_to_all]
    by = {"short": [True] * 4, "long": [False, True, True, True]}  # direct is played by sockets, too
    for (name, expected), payload in zip(by.items(), (short, long), strict=True):
        for call, sockets_carry in zip(calls, expected, strict=True):
            apart._group.prepared.clear()
            call(payload.clone())
            assert (transports_of(apart) == {"sockets"}) is sockets_carry, (name, call)
    apart.free()


def test_few_rounds_where_they_are_faster(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(sockets.VARIABLE, "on")
    monkeypatch.setattr(socket_calls, "read_choices", lambda _: {entry_of(world.size): ANSWERS[FEW_ROUNDS]})
    apart = make_apart(world)
    limit = MAX_FLAT_BYTES // 8 // (apart.size - 1)
    for length in (1, limit, limit + 1, 6000):
        for step in range(3):
            tensor = torch.arange(length) + (apart.rank + 1) * step
            assert torch.equal(
                apart.allreduce(tensor), apart.size * torch.arange(length) + step * sum(range(1, apart.size + 1))
            )
            table = torch.arange(apart.size).repeat_interleave(length) + 10 * apart.rank
            received = apart.all_to_all(table).view(apart.size, length)
            assert torch.equal(received, (10 * torch.arange(apart.size) + apart.rank).view(-1, 1).expand(-1, length))
            apart.barrier()
    planned = {(plan.collective, plan.nbytes): plan.algorithm for plan in apart._group.prepared}
    assert planned["allreduce", 8] == planned["allreduce", 8 * limit] == "flat" != planned["allreduce", 8 * limit + 8]
    assert planned["allreduce", 48_000] == "circulant"
    assert planned["all_to_all", 8 * apart.size] == "direct"
    apart.free()


def test_a_strided_tensor_and_a_long_one(apart: World) -> None:
    strided = torch.ones(8, 6).t()
    assert torch.equal(apart.allreduce(strided), torch.full((6, 8), float(apart.size)))
    long = torch.ones(MAX_SHORT_BYTES // 4 + 1)
    assert torch.equal(apart.allreduce(long), torch.full_like(long, float(apart.size)))
    reduced = torch.ones_like(long)
    apart.reduce(reduced, 0)
    assert torch.equal(reduced, torch.full_like(long, float(apart.size if apart.rank == 0 else 1)))
    assert transports_of(apart) == {"sockets"}
    apart.reduce(reduced, 0, "maximum")
    assert "sockets" not in {plan.transport for plan in apart._group.prepared if plan.op == "maximum"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1, 257, 8000, 300_003])
def test_exact_sums_have_the_bits_of_messages(apart: World, dtype: torch.dtype, length: int) -> None:
    own = torch.randn(length, generator=torch.Generator().manual_seed(length + apart.rank)).to(dtype)
    own[length // 3 * apart.rank :][:1] = torch.inf if length == 257 else torch.nan
    expected = apart.allreduce(own.clone(), "ring", "exact")
    summed = torch.empty_like(own)
    for _ in range(3):  # of which the later ones find what was prepared
        apart.allreduce(summed.copy_(own), wire="exact")
        assert summed.numpy().tobytes() == expected.numpy().tobytes()
    (plan,) = [plan for plan in apart._group.prepared if plan.wire == EXACT]
    flat = apart.size == 2 and own.nbytes <= MAX_FLAT_BYTES
    assert (plan.algorithm, plan.transport) == ("flat" if flat else "direct", "sockets")


def test_one_rank_without_them_leaves_all_to_the_library(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(sockets.VARIABLE, "off" if world.rank == 0 else "on")
    apart = make_apart(world)
    assert apart.allreduce(torch.ones(3)).tolist() == [apart.size] * 3
    assert transports_of(apart) == {"library"}
    apart.free()


Mistake = tuple[Callable[[World], object], Callable[[World], object], str, str]

MISTAKES: dict[str, Mistake] = {
    "collective": (
        lambda world: world.allreduce(torch.zeros(5)),
        lambda world: world.barrier(),
        "allreduce(5 x float32, tree by sockets)",
        "barrier()",
    ),
    "size": (
        lambda world: world.reduce_scatter(torch.zeros(50)),
        lambda world: world.reduce_scatter(torch.zeros(70)),
        "reduce_scatter(50 x float32, circulant by sockets)",
        "reduce_scatter(70 x float32, circulant by sockets)",
    ),
    "op": (
        lambda world: world.allreduce(torch.zeros(5)),
        lambda world: world.allreduce(torch.zeros(5), op="maximum"),
        "allreduce(5 x float32, tree by sockets)",
        "allreduce(5 x float32, tree by sockets, op maximum)",
    ),
    "algorithm": (
        lambda world: world.allreduce(torch.zeros(5)),
        lambda world: world.allreduce(torch.zeros(5), "tree"),
        "allreduce(5 x float32, tree by sockets)",
        "allreduce(5 x float32, tree)",
    ),
    "object": (
        lambda world: world.all_gather_object("what"),
        lambda world: world.all_gather(torch.zeros(1), torch.zeros(world.size)),
        "all_gather_object()",
        "x float32, circulant by sockets)",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_on_every_rank(broken: World, mistake: str) -> None:
    call, other_call, message, other_message = MISTAKES[mistake]
    broken.allreduce(torch.zeros(3))
    with pytest.raises(MismatchError) as caught:
        (other_call if broken.rank == 0 else call)(broken)
    assert message in str(caught.value)
    assert other_message in str(caught.value)
    with pytest.raises(MismatchError):
        broken.allreduce(torch.zeros(3))


def random_call(chance: random.Random, ranks: int) -> tuple[tuple[object, ...], Callable[[World], object]]:
    """Return what distinguishes a call from others, and the call."""
    length, dtype = chance.choice((1, 60, 500, 5000, 40_000)), chance.choice((torch.float32, torch.int64))
    op, root = chance.choice(("sum", "maximum")), chance.randrange(ranks)

    def tensor(parts: int = 1) -> torch.Tensor:
        return torch.zeros(length * parts, dtype=dtype)

    calls: dict[str, tuple[tuple[object, ...], Callable[[World], object]]] = {
        "allreduce": ((op,), lambda world: world.allreduce(tensor(), op=op)),
        "broadcast": ((root,), lambda world: world.broadcast(tensor(), root)),
        "reduce_scatter": ((op,), lambda world: world.reduce_scatter(tensor(), op=op)),
        "all_gather": ((), lambda world: world.all_gather(tensor(), tensor(world.size))),
        "all_to_all": ((), lambda world: world.all_to_all(tensor(world.size))),
        "reduce": ((root, op), lambda world: world.reduce(tensor(), root, op)),
        "barrier": ((), lambda world: world.barrier()),
    }
    name = chance.choice(list(calls))
    parameters, call = calls[name]
    return (name, *parameters, *((length, dtype) if name != "barrier" else ())), call


def test_random_mistakes_are_named_on_every_rank(
    differing: None, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank makes another call; half of both were made before. A rank that waits for nobody learns of it soon."""
    monkeypatch.setenv(sockets.VARIABLE, "on")
    for seed in range(MISTAKES_MADE):
        chance, apart = random.Random(seed), make_apart(world)
        what, call = random_call(chance, world.size)
        other_what, other = what, call
        while other_what == what:
            other_what, other = random_call(chance, world.size)
        if chance.random() < 0.5:
            call(apart)
            other(apart)
        with pytest.raises(MismatchError):
            (other if world.rank == chance.randrange(world.size) else call)(apart)
            for _ in range(3):
                apart.barrier()
        apart._group.abandon()
        world.barrier()


def test_a_mistake_where_ranks_wait_for_nobody_is_named_by_the_next_calls(broken: World) -> None:
    broken.allreduce(torch.zeros(3))
    with pytest.raises(MismatchError, match=r"broadcast\(5 x float32, root [01], tree/.*\), but .* root [01], tree/"):
        for _ in range(2):
            broken.broadcast(torch.zeros(5), min(broken.rank, 1))
        for _ in range(2):  # a rank that finds it is missing in the second one
            broken.barrier()


@pytest.mark.parametrize("algorithm", ["auto", "ring"])
@pytest.mark.parametrize("length", [100, 1000])
def test_shards_of_exact_sums_are_gathered_where_they_lie(apart: World, algorithm: str, length: int) -> None:
    """Sums are of whole blocks of 256 numbers, and shards are not."""
    given = torch.arange(length, dtype=torch.float32)
    shard = apart.reduce_scatter(given.clone(), algorithm, wire="exact")
    gathered = apart.all_gather(shard.clone(), torch.full((length,), -1.0), algorithm, wire="exact")
    assert torch.equal(gathered, given * apart.size)


def test_an_exact_sum_that_is_refused_leaves_the_tensor(apart: World) -> None:
    given = torch.rand(1000)
    kept = given.clone()
    with pytest.raises(UsageError, match="no schedule 'rnig'"):
        apart.allreduce(given, "rnig", wire="exact")
    assert torch.equal(given, kept)


@pytest.mark.parametrize("how", [(), ("ring", "exact")])
def test_arguments_that_one_rank_refuses(broken: World, how: tuple[str, ...]) -> None:
    broken.allreduce(torch.zeros(3))
    with pytest.raises(TensorError if broken.rank == 0 else MismatchError, match="share memory"):
        if broken.rank == 0:
            broken.allreduce(torch.zeros(1).expand(5), *how)
        else:
            broken.allreduce(torch.zeros(5), *how)


def test_a_refusal_on_all_ranks_in_words_of_their_own_leaves_a_group_with_a_label_usable(apart: World) -> None:
    with apart.labelled(" averaged"), pytest.raises(TensorError, match="share memory"):
        payload = torch.ones(4 * apart.size)
        apart.reduce_scatter(payload, out=payload[1:5])
    apart.barrier()


def test_a_name_of_no_interface_is_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_calls, "read_choices", lambda _: {})
    apart = make_apart(world)
    monkeypatch.setenv(sockets.VARIABLE, "eht0" if world.rank == 1 else "on")
    with pytest.raises(UsageError, match="rank 1: UNISONO_SOCKETS names no interface of its host"):
        apart.allreduce(torch.ones(4))
    apart.free()


def test_labels_are_compared_too(broken: World) -> None:
    broken.allreduce(torch.zeros(3))
    broken._group.label_calls(f" of layer {min(broken.rank, 1)}")
    with pytest.raises(MismatchError, match=r"of layer [01], but .* of layer [01]"):
        broken.allreduce(torch.zeros(3))


def test_a_run_and_the_next_have_the_same_answer(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine is measured once: sums of the library and by sockets have other orders."""
    monkeypatch.delenv(sockets.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for faster in (True, False):
        answers = iter([int(faster), int(not faster)])
        monkeypatch.setattr(socket_calls, "measure", lambda *_, answers=answers: next(answers))
        for _ in range(2):
            apart = make_apart(world)
            apart.allreduce(torch.ones(3))
            assert transports_of(apart) == ({"sockets"} if faster else {"library"})
            apart.free()
        assert next(answers) != faster, "it was measured once"
        if world.rank == 0:  # what others have kept meanwhile holds
            (file,) = tmp_path.rglob("choices-*.json")
            assert keep_choice(file, entry_of(world.size), None, ANSWERS[FEW_ROUNDS]) == ANSWERS[int(faster)]
        world.barrier()
        for file in tmp_path.rglob("choices-*.json"):
            file.unlink()
        world.barrier()
