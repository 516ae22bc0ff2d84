"""Parts of any size, and reduce: all_to_all_v, all_gather_v, gather and scatter, beside the expected result."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from unisono.collectives.all_gather import all_gather, all_gather_v
from unisono.collectives.all_to_all import all_to_all, all_to_all_v, gather, scatter
from unisono.collectives.allreduce import allreduce
from unisono.collectives.group import Group
from unisono.collectives.reduce import broadcast, reduce
from unisono.errors import MismatchError, TensorError, UsageError
from unisono.placement import Placement, one_rank_per_node, place, regular
from unisono.transports import window
from unisono.transports.arithmetic import dtypes_of
from unisono.world import World

PLACEMENTS: dict[str, Callable[[int], Placement]] = {
    "one node": lambda ranks: regular(1, 1, ranks),
    "two nodes by turns": lambda ranks: place([rank % 2 for rank in range(ranks)]),
    "apart": one_rank_per_node,
}

DTYPES = (torch.float32, torch.bool, torch.complex128, torch.float8_e5m2, torch.uint16)
"""Bytes are moved: numbers of 4, 1, 16 and 2 bytes, among them dtypes that NumPy or MPI lacks."""


@pytest.fixture(params=PLACEMENTS)
def these(request: pytest.FixtureRequest, world: World) -> Group:
    """All ranks, with pieces of 16 KB between nodes."""
    table = replace(world.table, network=replace(world.table.network, beta=1.0))
    group = Group(world.comm.Dup(), PLACEMENTS[request.param](world.size), table)
    request.addfinalizer(group.free)
    return group


@pytest.fixture(params=PLACEMENTS)
def broken(request: pytest.FixtureRequest, world: World, differing: None) -> Group:
    """All ranks, as a group that is not used again."""
    request.addfinalizer(world.barrier)
    group = Group(world.comm.Dup(), PLACEMENTS[request.param](world.size), world.table)
    request.addfinalizer(group.abandon)
    return group


def held(source: int, target: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """What rank `source` has for rank `target`."""
    values = torch.arange(length) * (3 * source + target + 1) + source
    return values.remainder(2 if dtype is torch.bool else 120).to(dtype)


def somewhere(tensor: torch.Tensor, stride: int) -> torch.Tensor:
    """The same values, `stride` elements apart."""
    spread_out = torch.zeros(tensor.numel(), stride, dtype=tensor.dtype)
    spread_out[:, 0] = tensor
    return spread_out[:, 0]


def nothing(length: int, dtype: torch.dtype, stride: int) -> torch.Tensor:
    """Where so many values have room."""
    return somewhere(torch.zeros(length, dtype=dtype), stride)


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    bits = [tensor.contiguous().view(torch.uint8) for tensor in (actual, expected) if tensor.numel()]
    return actual.shape == expected.shape and (not bits or torch.equal(*bits))


def lengths_of(chance: random.Random, count: int) -> list[int]:
    """Some of nothing, some short, some of several pieces, some of whole pieces."""
    kinds = (lambda: 0, lambda: chance.randrange(50), lambda: chance.randrange(40_000), lambda: 16_384, lambda: 4096)
    return [chance.choice(kinds)() for _ in range(count)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_to_all_v(these: Group, dtype: torch.dtype) -> None:
    rank, size, chance = these.rank, these.size, random.Random(str(dtype))
    for _ in range(4):
        lengths = [lengths_of(chance, size) for _ in range(size)]
        stride = chance.randint(1, 2)
        sends = [somewhere(held(rank, peer, lengths[rank][peer], dtype), stride) for peer in range(size)]
        receives = [nothing(lengths[peer][rank], dtype, 3 - stride) for peer in range(size)]
        all_to_all_v(these, sends, receives)
        for peer, received in enumerate(receives):
            assert same(received, held(peer, rank, lengths[peer][rank], dtype)), lengths
            assert same(sends[peer], held(rank, peer, lengths[rank][peer], dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_gather(these: Group, dtype: torch.dtype) -> None:
    chance = random.Random(str(dtype))
    for _ in range(4):
        lengths, stride = lengths_of(chance, these.size), chance.randint(1, 2)
        parts = [nothing(length, dtype, stride) for length in lengths]
        all_gather_v(these, somewhere(held(these.rank, 0, lengths[these.rank], dtype), 3 - stride), parts)
        for peer, part in enumerate(parts):
            assert same(part, held(peer, 0, lengths[peer], dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather_and_scatter(these: Group, dtype: torch.dtype) -> None:
    chance = random.Random(str(dtype))
    for root in range(these.size):
        lengths, stride = lengths_of(chance, these.size), chance.randint(1, 2)
        mine = somewhere(held(these.rank, root, lengths[these.rank], dtype), stride)
        parts = [nothing(length, dtype, 3 - stride) for length in lengths] if these.rank == root else None
        gather(these, mine, parts, root)
        for peer, part in enumerate(parts or ()):
            assert same(part, held(peer, root, lengths[peer], dtype))
        back = nothing(lengths[these.rank], dtype, stride)
        scatter(these, back, parts, root)
        assert same(back, mine)


@pytest.mark.parametrize("op", ["sum", "product", "maximum", "xor"])
def test_reduce(these: Group, op: str) -> None:
    combine = {"sum": torch.add, "product": torch.mul, "maximum": torch.maximum, "xor": torch.bitwise_xor}[op]
    for dtype in dtypes_of(op):
        for length in (0, 1, 70_001) if dtype.itemsize == 2 else (997,):
            rows = [held(rank, 0, length, torch.int64).remainder(4).to(dtype) for rank in range(these.size)]
            expected = rows[0].to(torch.int64 if not dtype.is_floating_point and dtype is not torch.bool else dtype)
            for row in rows[1:]:
                expected = combine(expected, row.to(expected.dtype))
            for root in range(these.size):
                tensor = somewhere(rows[these.rank], 1 + root % 2)
                reduce(these, tensor, root, op)
                assert torch.equal(tensor, expected.to(dtype) if these.rank == root else rows[these.rank]), dtype


def test_reduce_in_many_pieces(world: World, these: Group) -> None:
    rows = [torch.randn(300_001, generator=torch.Generator().manual_seed(rank)) for rank in range(these.size)]
    for root in {0, these.size - 1}:
        tensor = rows[these.rank].clone()
        reduce(these, tensor, root)
        if these.rank == root:
            torch.testing.assert_close(tensor, torch.stack(rows).sum(dim=0))
            assert not these.one_node or torch.equal(tensor, sum(rows[1:], rows[0]))
        else:
            assert torch.equal(tensor, rows[these.rank])


def test_many_pieces_through_slots_of_any_size(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that are cut in odd places: slots of as few bytes as the sizes that stand in front take, and more."""
    for slot in (16 * world.size, 16 * world.size + 16, 4096):
        monkeypatch.setattr(window, "plan_slot", lambda free, ranks, beside, slot=slot: slot)
        group = Group(world.comm.Dup(), regular(1, 1, world.size), world.table)
        chance = random.Random(slot)
        lengths = [[chance.choice([0, 1, 15, 16, 200, 999]) for _ in range(group.size)] for _ in range(group.size)]
        sends = [held(group.rank, peer, lengths[group.rank][peer], torch.int16) for peer in range(group.size)]
        receives = [torch.zeros(lengths[peer][group.rank], dtype=torch.int16) for peer in range(group.size)]
        all_to_all_v(group, sends, receives)
        for peer, received in enumerate(receives):
            assert same(received, held(peer, group.rank, len(received), torch.int16))
        parts = [torch.zeros(lengths[0][peer], dtype=torch.int16) for peer in range(group.size)]
        all_gather_v(group, held(group.rank, 0, lengths[0][group.rank], torch.int16), parts)
        for peer, part in enumerate(parts):
            assert same(part, held(peer, 0, len(part), torch.int16))
        group.free()


@pytest.mark.parametrize("algorithm", ["auto", "library", "direct"])
def test_all_to_all_into_a_tensor(these: Group, algorithm: str) -> None:
    for dtype in (torch.complex128, torch.float8_e4m3fn, torch.bool):
        part = 20_011
        mine = torch.cat([held(these.rank, peer, part, dtype) for peer in range(these.size)])
        expected = torch.cat([held(peer, these.rank, part, dtype) for peer in range(these.size)])
        for out in (torch.zeros(these.size * part, dtype=dtype), torch.zeros(part * these.size, 2, dtype=dtype)[:, 1]):
            assert all_to_all(these, mine, algorithm, out) is out
            assert same(out, expected)
    with pytest.raises(TensorError, match="does not fit"):
        all_to_all(these, torch.zeros(these.size), algorithm, torch.zeros(these.size + 1))


def test_conjugated_tensors(these: Group) -> None:
    """Such a tensor's memory is not what it stands for."""
    values = torch.complex(torch.arange(4.0), torch.ones(4))
    parts = [torch.zeros(4, dtype=torch.complex64).conj() for _ in range(these.size)]
    all_gather_v(these, values.conj(), parts)
    assert all(torch.equal(part, values.conj()) for part in parts)


def test_sizes_that_do_not_fit_raise(these: Group) -> None:
    tensor = torch.zeros(3)
    with pytest.raises(TensorError, match=f"it needs {these.size} of float32, one for each rank"):
        all_to_all_v(these, [tensor] * (these.size + 1), [tensor] * these.size)
    with pytest.raises(TensorError, match=r"needs .* of float32"):
        all_gather_v(these, tensor, [torch.zeros(3, dtype=torch.int32)] * these.size)
    with pytest.raises(TensorError, match="make them equally long"):
        all_gather_v(these, tensor, [torch.zeros(4)] * these.size)
    with pytest.raises(UsageError, match="gather with root 99"):
        gather(these, tensor, None, 99)
    with pytest.raises(UsageError, match="scatter with root -1"):
        scatter(these, tensor, None, -1)
    with pytest.raises(UsageError, match="reduce with root 99"):
        reduce(these, tensor, 99)
    with pytest.raises(TensorError, match="by 'and'"):
        reduce(these, tensor, 0, "and")
    refused = (TensorError, "gather of 0 parts") if these.rank == 0 else (MismatchError, "gather, which it refused")
    with pytest.raises(refused[0], match=refused[1]):
        gather(these, tensor, None, 0)
        these.barrier()


WRONG = {"too short": (5, 7), "too long": (7, 5), "nothing": (0, 7), "unexpected": (7, 0), "pieces": (300_000, 100_000)}


@pytest.mark.parametrize("case", WRONG)
def test_size_mismatch_raises_on_every_rank(broken: Group, case: str) -> None:
    if broken.size == 1:
        pytest.skip("one rank agrees with itself")
    goes, comes = WRONG[case]
    last = broken.size - 1
    sends = [torch.zeros(goes if (broken.rank, peer) == (0, last) else 4) for peer in range(broken.size)]
    receives = [torch.zeros(comes if (peer, broken.rank) == (0, last) else 4) for peer in range(broken.size)]
    with pytest.raises(MismatchError) as caught:
        all_to_all_v(broken, sends, receives)
        broken.barrier()
    assert "rank 0 sends " in str(caught.value)
    assert f"bytes to rank {last}, which expects {4 * comes}:" in str(caught.value)


CALLS: dict[str, tuple[Callable[[Group], object], Callable[[Group], object], str, str]] = {
    "root of a gather": (
        lambda group: gather(group, torch.zeros(3), list(torch.zeros(group.size, 3)), 0),
        lambda group: gather(group, torch.zeros(3), list(torch.zeros(group.size, 3)), 1),
        "gather(float32, root 0)",
        "gather(float32, root 1)",
    ),
    "root of a scatter": (
        lambda group: scatter(group, torch.zeros(3), [torch.zeros(3)] * group.size, 0),
        lambda group: scatter(group, torch.zeros(3), [torch.zeros(3)] * group.size, 1),
        "scatter(float32, root 0)",
        "scatter(float32, root 1)",
    ),
    "root of a reduce": (
        lambda group: reduce(group, torch.zeros(3), 0),
        lambda group: reduce(group, torch.zeros(3), 1),
        "reduce(3 x float32, root 0",
        "reduce(3 x float32, root 1",
    ),
    "op of a reduce": (
        lambda group: reduce(group, torch.zeros(3), 0, "minimum"),
        lambda group: reduce(group, torch.zeros(3), 0, "maximum"),
        "op minimum)",
        "op maximum)",
    ),
    "lengths of an all_gather_v": (
        lambda group: all_gather_v(group, torch.zeros(3), list(torch.zeros(group.size, 3))),
        lambda group: all_gather_v(group, torch.zeros(4), list(torch.zeros(group.size, 4))),
        "all_gather_v(3, 3",
        "all_gather_v(4, 4",
    ),
    "dtype of a all_gather": (
        lambda group: all_gather(group, torch.zeros(2).half(), torch.zeros(2 * group.size).half()),
        lambda group: all_gather(group, torch.zeros(2).short(), torch.zeros(2 * group.size).short()),
        " x float16",
        " x int16",
    ),
    "dtype of an all_to_all": (
        lambda group: all_to_all(group, torch.zeros(2 * group.size).half()),
        lambda group: all_to_all(group, torch.zeros(2 * group.size).short()),
        " x float16",
        " x int16",
    ),
    "dtype of a broadcast": (
        lambda group: broadcast(group, torch.zeros(3).half()),
        lambda group: broadcast(group, torch.zeros(3).short()),
        "broadcast(3 x float16",
        "broadcast(3 x int16",
    ),
    "dtype of an all_to_all_v": (
        lambda group: all_to_all_v(group, [torch.zeros(3)] * group.size, list(torch.zeros(group.size, 3))),
        lambda group: all_to_all_v(group, [torch.zeros(3).int()] * group.size, list(torch.zeros(group.size, 3).int())),
        "all_to_all_v(float32)",
        "all_to_all_v(int32)",
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_mismatch_names_both_calls_on_every_rank(broken: Group, case: str) -> None:
    if broken.size == 1:
        pytest.skip("one rank agrees with itself")
    call, other_call, message, other_message = CALLS[case]
    with pytest.raises(MismatchError) as caught:
        (other_call if broken.rank == broken.size - 1 else call)(broken)
        for _ in range(2):  # where ranks wait for nobody, as the leaves of a tree do, the next calls tell them
            broken.barrier()
    assert message in str(caught.value)
    assert other_message in str(caught.value)


def test_a_default_device_of_the_program_makes_no_memory_of_collectives(these: Group) -> None:
    rank, size = these.rank, these.size
    own, total = torch.full((60_000,), rank + 1.0), size * (size + 1) / 2
    halves = own.bfloat16()
    spaced = [torch.zeros(3 * size, 2)[:, 1], *(torch.zeros(3, 2)[:, 1] for _ in range(size))]
    with torch.device("meta"):
        allreduce(these, halves)
        exact = allreduce(these, own.clone(), "ring", "exact")
        all_gather(these, own[:3], spaced[0])
        all_to_all_v(these, [own[:3]] * size, spaced[1:])
        shared = allreduce(these, these.empty(100, torch.float32) + 1)
        given = allreduce(these, own.clone(), "library", op="maximum")
    assert halves.tolist()[-1] == exact.tolist()[0] == total
    assert (
        spaced[0].tolist() == torch.cat(spaced[1:]).tolist() == [rank + 1.0 for rank in range(size) for _ in range(3)]
    )
    assert shared.tolist() == [size] * 100 and given.tolist()[0] == size
