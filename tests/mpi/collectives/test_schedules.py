"""The collectives agree with a float64 sum, over a grid of lengths, dtypes, strides, algorithms and places."""

from __future__ import annotations

import tracemalloc
from functools import cache

import numpy as np
import pytest
import torch
from tests.mpi.collectives.distinct import RANKS, distinct

from unisono.collectives.group import Group
from unisono.errors import MismatchError, TensorError, UsageError
from unisono.network.pace import MAX_LANDING_BYTES
from unisono.placement import one_rank_per_node, place, regular
from unisono.schedules import find, names
from unisono.schedules.pieces import bounds
from unisono.transports.arithmetic import DTYPES
from unisono.wires import WIRES
from unisono.wires.rounded import Rounded
from unisono.world import World

ONE_NODE = ["auto", "library", *distinct(regular(1, 1, RANKS))]
ACROSS = ["auto", "library", *distinct(place([rank % 2 for rank in range(RANKS)]))]
"""The others have the program of one of these: `test_every_name` plays each of them once."""

APART = one_rank_per_node(2)
HALVES = [name for name in ("auto", "library", *names()) if name not in names() or find(name, APART).reduce_scatter]
LENGTHS = [0, 1, 10_007, 1_000_003]

ALL_DTYPES = ("auto", "library", "flat", "direct", "ring")
"""Played with every dtype. Others differ in who sends what when: one dtype of each kind of arithmetic, tested alone."""


@cache
def whole_numbers(rank: int, length: int) -> torch.Tensor:
    """Small ones, whose sums are exact in every dtype."""
    return torch.randint(0, 9, (length,), generator=torch.Generator().manual_seed(length * 31 + rank))


@cache
def total(ranks: int, length: int) -> torch.Tensor:
    return torch.stack([whole_numbers(rank, length).double() for rank in range(ranks)]).sum(dim=0)


def contribution(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank brings: its own copy."""
    return whole_numbers(rank, length).to(dtype, copy=True)


def dtypes_of(algorithm: str, length: int) -> tuple[torch.dtype, ...]:
    if length == 1_000_003:
        return torch.float32, torch.bfloat16
    return DTYPES if algorithm in ALL_DTYPES else (torch.float32, torch.bfloat16, torch.bool)


def expected(world: World, length: int, dtype: torch.dtype) -> torch.Tensor:
    return total(world.size, length).to(dtype)


@pytest.mark.parametrize("name", names())
def test_every_name(world: World, spread: World, name: str) -> None:
    for these in (world, spread):
        tensor = contribution(these.rank, 10_007, torch.float32)
        these.allreduce(tensor, name)
        assert torch.equal(tensor, expected(these, 10_007, torch.float32))


@pytest.mark.parametrize("algorithm", ONE_NODE)
@pytest.mark.parametrize("length", LENGTHS)
def test_allreduce(world: World, algorithm: str, length: int) -> None:
    for dtype in dtypes_of(algorithm, length):
        tensor = contribution(world.rank, length, dtype)
        assert world.allreduce(tensor, algorithm) is tensor
        assert torch.equal(tensor, expected(world, length, dtype)), dtype


@pytest.mark.parametrize("algorithm", ONE_NODE)
@pytest.mark.parametrize("length", LENGTHS)
def test_allreduce_in_a_window(group: World, algorithm: str, length: int) -> None:
    room = group.empty(8 * (length + 3), torch.uint8)
    for dtype in dtypes_of(algorithm, length):
        window = room.zero_().view(dtype)[: length + 3]
        tensor = window[2 : 2 + length]
        tensor.copy_(contribution(group.rank, length, dtype))
        for _ in range(2):  # the second time goes by the plan that the first has kept
            tensor.copy_(contribution(group.rank, length, dtype))
            group.allreduce(tensor, algorithm)
            assert torch.equal(tensor, expected(group, length, dtype)), dtype
        assert (window[[0, 1, -1]] == 0).all()


@pytest.mark.parametrize("algorithm", ONE_NODE)
def test_real_numbers_and_equal_bits_on_all_ranks(world: World, algorithm: str) -> None:
    for dtype, once in (
        (torch.float64, 1e-15),
        (torch.float32, 1e-6),
        (torch.bfloat16, 2**-8),
        (torch.float16, 2**-11),
    ):
        rows = [
            torch.randn(4099, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(world.size)
        ]
        tensor = rows[world.rank].clone()
        world.allreduce(tensor, algorithm)
        exact = torch.stack(rows).double().sum(dim=0)
        at_once = algorithm in ("auto", "library", "flat", "direct")  # others round at every hop
        tolerance = once if at_once else once * world.size
        assert (tensor.double() - exact).abs().max() <= tolerance * torch.stack(rows).double().abs().sum(dim=0).max()
        everyone = world.all_gather_object(tensor.view(torch.uint8).numpy().tobytes())
        assert len(set(everyone)) == 1


@pytest.mark.parametrize("algorithm", ["auto", "flat", "direct"])
def test_one_node_sums_in_the_order_of_ranks(group: World, algorithm: str) -> None:
    rows = [torch.randn(5000, generator=torch.Generator().manual_seed(rank)) for rank in range(group.size)]
    serial = rows[0].clone()
    for row in rows[1:]:
        serial += row
    window = group.empty(5000, torch.float32)
    window.copy_(rows[group.rank])
    for tensor in (rows[group.rank].clone(), window):
        assert torch.equal(group.allreduce(tensor, algorithm), serial)


@pytest.mark.parametrize("algorithm", ONE_NODE)
def test_any_shape_and_stride(world: World, algorithm: str) -> None:
    values = torch.arange(4 * 6 * 10, dtype=torch.float32).view(4, 6, 10)
    for pick in (lambda t: t, lambda t: t.permute(2, 0, 1), lambda t: t[:, ::2, 1:-1], lambda t: t[1, 2, 3]):
        tensor = values.clone()
        world.allreduce(pick(tensor), algorithm)
        mirror = values.clone()
        pick(mirror).mul_(world.size)
        assert torch.equal(tensor, mirror)


@pytest.mark.parametrize("algorithm", [name for name in ONE_NODE if name in HALVES])
@pytest.mark.parametrize("length", LENGTHS)
def test_reduce_scatter_and_all_gather(world: World, algorithm: str, length: int) -> None:
    for dtype in dtypes_of(algorithm, length):
        tensor = contribution(world.rank, length, dtype)
        before = tensor.clone()
        shard = world.reduce_scatter(tensor, algorithm)
        assert torch.equal(tensor, before)
        assert torch.equal(shard, expected(world, length, dtype)[slice(*bounds(length, world.size, world.rank))])
        part = torch.empty_like(shard)
        assert world.reduce_scatter(tensor, algorithm, out=part) is part
        assert torch.equal(part, shard)
        out = torch.empty(length, dtype=dtype)
        assert world.all_gather(shard, out, algorithm) is out
        assert torch.equal(out, expected(world, length, dtype)), dtype


def test_all_gather_of_any_dtype_into_any_stride(world: World) -> None:
    for dtype in (torch.bool, torch.complex64, torch.float64, torch.complex128, torch.float8_e4m3fn):
        values = torch.arange(30).remainder(2).to(dtype)
        out = torch.zeros(5, 12, dtype=dtype)[:, ::2]
        world.all_gather(values[slice(*bounds(30, world.size, world.rank))], out)
        assert torch.equal(out, values.view(5, 6))


@pytest.mark.parametrize("algorithm", ["auto", "library", "ring"])
def test_all_gather_in_place(world: World, spread: World, algorithm: str) -> None:
    for these in (world, spread):
        out = torch.zeros(10_007)
        own = out[slice(*bounds(len(out), these.size, these.rank))].fill_(these.rank + 1.0)
        these.all_gather(own, out, algorithm)
        for rank in range(these.size):
            assert (out[slice(*bounds(len(out), these.size, rank))] == rank + 1).all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.complex128, torch.bfloat16, torch.uint16], ids=str)
def test_broadcast(world: World, dtype: torch.dtype) -> None:
    for root in range(world.size):
        for shape in ((0,), (), (7, 5)):
            tensor = torch.full(shape, 3 * world.rank + 1).to(dtype)
            world.broadcast(tensor, root)
            assert torch.equal(tensor, torch.full(shape, 3 * root + 1).to(dtype))
        grid = torch.full((4, 4), world.rank).to(dtype)
        world.broadcast(grid.t()[1:], root)
        assert torch.equal(grid[:, 1:], torch.full((4, 3), root).to(dtype))
        assert torch.equal(grid[:, 0], torch.full((4,), world.rank).to(dtype))


@pytest.mark.parametrize("algorithm", ["auto", "library", "tree", "pipeline"])
def test_broadcast_across_nodes(spread: World, algorithm: str) -> None:
    for root in range(spread.size):
        for length in (0, 1, 300_007):
            tensor = contribution(spread.rank, length, torch.float32)
            assert spread.broadcast(tensor, root, algorithm) is tensor
            assert torch.equal(tensor, contribution(root, length, torch.float32))


@pytest.mark.parametrize("algorithm", ["auto", "library", "direct"])
def test_all_to_all(world: World, spread: World, algorithm: str) -> None:
    for these in (world, spread):
        for dtype in (torch.float32, torch.bool, torch.int16, torch.complex64, torch.complex128):
            for part in (0, 1, 50_001):
                mine = (torch.arange(these.size * part) * (these.rank + 1)).remainder(117).to(dtype)
                rows = [
                    (torch.arange(these.size * part) * (rank + 1)).remainder(117).to(dtype).view(these.size, part)
                    for rank in range(these.size)
                ]
                expected = torch.stack([row[these.rank] for row in rows]).view(-1)
                assert torch.equal(these.all_to_all(mine, algorithm), expected)
                assert these.all_to_all(mine, algorithm, out := torch.empty_like(mine)) is out
                assert torch.equal(out, expected)
    with pytest.raises(TensorError, match="x torch.float32, does not fit"):
        world.all_to_all(torch.zeros(4 * world.size), out=torch.zeros(4 * world.size - 1))
    if world.size > 1:
        with pytest.raises(TensorError, match="not divisible by"):
            world.all_to_all(torch.zeros(world.size + 1))


@pytest.mark.parametrize("wire", [name for name in WIRES if not name.startswith(("int", "exact"))])
@pytest.mark.parametrize("algorithm", [name for name in ACROSS if name != "library"])
def test_wires(spread: World, algorithm: str, wire: str) -> None:
    rows = [torch.randn(4099, generator=torch.Generator().manual_seed(rank)) for rank in range(spread.size)]
    expected = torch.stack(rows).double().sum(dim=0)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int32):
        tensor = rows[spread.rank].to(dtype, copy=True)
        if dtype is torch.int32:
            spread.allreduce(tensor, algorithm, wire)
            assert torch.equal(tensor, torch.stack([row.to(dtype) for row in rows]).sum(dim=0).to(dtype))
            continue
        spread.allreduce(tensor, algorithm, wire)
        coarse = max(torch.finfo(dtype).eps, torch.finfo(getattr(torch, wire)).eps)
        assert (tensor.double() - expected).abs().max() <= coarse * 4 * (spread.size + 1)
        assert len(set(spread.all_gather_object(tensor.view(torch.uint8).numpy().tobytes()))) == 1
    if spread.size > 1:
        with pytest.raises(TensorError, match="no wire 'float8'"):
            spread.allreduce(torch.zeros(3), algorithm, "float8")


@pytest.mark.parametrize("algorithm", ["hierarchical/flat", "leader/flat", "hierarchical"])
def test_ranks_agree_without_mailboxes_on_uneven_nodes(
    world: World, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    """Messages within a node are not rounded either: a rank that is alone on its node never sends the sum on."""
    monkeypatch.setattr(Group, "mailboxes", lambda *_: None)
    placed = place([0] * max(1, world.size - 1) + [1] * (world.size > 1))
    uneven = World(world.comm.Dup(), placed, world.table)
    tensor = torch.randn(4099, generator=torch.Generator().manual_seed(uneven.rank))
    uneven.allreduce(tensor, algorithm, "bfloat16")
    assert len(set(uneven.all_gather_object(tensor.numpy().tobytes()))) == 1
    uneven.free()


def test_a_wire_carries_half_the_bytes(spread: World, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    encode = Rounded.encode

    def counted(self: Rounded, values: np.ndarray, encoded: np.ndarray) -> None:
        sent.append(encoded.nbytes)
        encode(self, values, encoded)

    monkeypatch.setattr(Rounded, "encode", counted)
    spread.allreduce(torch.ones(120_000), "ring", "bfloat16")
    assert sum(sent) == (2 * (spread.size - 1) * 240_000 // spread.size if spread.size > 1 else 0)


@pytest.mark.parametrize("algorithm", ["ring", "direct", "halving", "multicolor", "tree", "pipeline", "hierarchical"])
@pytest.mark.parametrize("wire", [None, "bfloat16"])
def test_extra_memory_is_that_of_the_pieces_in_flight(spread: World, algorithm: str, wire: str | None) -> None:
    payload = torch.zeros(12_000_000)
    spread.allreduce(payload, algorithm, wire)
    tracemalloc.start()
    spread.allreduce(payload, algorithm, wire)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.1 * MAX_LANDING_BYTES


def test_parameters_are_summed_too(world: World) -> None:
    parameter = torch.nn.Parameter(torch.ones(5))
    world.allreduce(parameter)
    assert torch.equal(parameter.detach(), torch.full((5,), float(world.size)))


def test_many_short_allreduces_of_many_lengths_and_dtypes(group: World) -> None:
    """Slots and plans are used again and again, also after more lengths than are kept."""
    for length in (*range(1, 400), *range(1, 20)):
        for dtype in (torch.float32, torch.int32):
            tensor = torch.full((length,), group.rank + 1).to(dtype)
            group.allreduce(tensor)
            assert tensor.eq(group.size * (group.size + 1) / 2).all()


@pytest.mark.parametrize("collective", ["allreduce", "reduce_scatter", "broadcast", "reduce", "all_to_all"])
def test_what_is_no_tensor_is_refused_with_the_remedy(world: World, collective: str) -> None:
    for value, kind in ((3.0, "float"), (np.ones(4), "ndarray")):
        with pytest.raises(
            TensorError, match=rf"{collective} takes a tensor, and this is of type {kind}: give torch\.as"
        ):
            getattr(world, collective)(value)
    with pytest.raises(TensorError, match="all_gather takes a tensor, and this is of type list"):
        world.all_gather(torch.zeros(1), [0.0])  # type: ignore[arg-type]
    assert world.allreduce(torch.ones(1)).item() == world.size


def test_nan_and_infinity_propagate(world: World) -> None:
    for algorithm in ONE_NODE:
        tensor = torch.tensor([float("nan"), float("inf"), 1.0] if world.rank == world.size - 1 else [0.0, 0.0, 0.0])
        world.allreduce(tensor, algorithm)
        assert tensor[0].isnan()
        assert tensor[1:].tolist() == [float("inf"), 1.0]


def test_unsupported_tensors_raise(world: World) -> None:
    with pytest.raises(TensorError, match="cannot reduce a tensor of complex64 by 'sum'"):
        world.allreduce(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(TensorError, match="sparse"):
        world.allreduce(torch.zeros(3).to_sparse())
    with pytest.raises(TensorError, match="meta"):
        world.allreduce(torch.zeros(3, device="meta"))
    with pytest.raises(TensorError, match="does not fit out"):
        world.all_gather(torch.zeros(99), torch.zeros(3))
    with pytest.raises(UsageError, match="no schedule 'rong'"):
        world.allreduce(torch.zeros(3), "rong")
    with pytest.raises(UsageError, match="'halving' has no reduce_scatter"):
        world.reduce_scatter(torch.zeros(3), "halving")
    with pytest.raises(UsageError, match="broadcast with root 99"):
        world.broadcast(torch.zeros(3), 99)
    with pytest.raises(UsageError, match="broadcast with root None"):
        world.broadcast(torch.zeros(3), None)  # type: ignore[arg-type]


def test_mismatch_raises_on_every_rank(group: World) -> None:
    if group.size == 1:
        pytest.skip("one rank agrees with itself")
    last = group.rank == group.size - 1
    with pytest.raises(MismatchError) as caught:
        group.allreduce(torch.zeros(7 if last else 5))
    assert "allreduce(7 x float32, flat)" in str(caught.value)
    assert "allreduce(5 x float32, flat)" in str(caught.value)
    with pytest.raises(MismatchError, match=r"barrier\(\)"):
        group.barrier() if last else group.allreduce(torch.zeros(300_000))
    assert group.allreduce(torch.ones(3)).tolist() == [group.size] * 3  # and they go on together


@pytest.mark.parametrize("algorithm", ACROSS)
@pytest.mark.parametrize("length", LENGTHS)
def test_across_nodes(spread: World, algorithm: str, length: int) -> None:
    assert spread.nodes == min(2, spread.size)
    for dtype in dtypes_of(algorithm, length):
        tensor = contribution(spread.rank, length, dtype)
        spread.allreduce(tensor, algorithm)
        assert torch.equal(tensor, expected(spread, length, dtype)), dtype
        if algorithm in HALVES:
            shard = spread.reduce_scatter(contribution(spread.rank, length, dtype), algorithm)
            own = slice(*bounds(length, spread.size, spread.rank))
            assert torch.equal(shard, expected(spread, length, dtype)[own]), dtype
            assert torch.equal(spread.all_gather(shard, torch.empty(length, dtype=dtype), algorithm), tensor), dtype
    spread.barrier()


def test_groups_within_nodes(spread: World) -> None:
    assert spread.node_world().size == len(range(spread.rank % 2, spread.size, 2))
    assert spread.node_world().nodes == 1
    assert spread.node_world().allreduce(torch.tensor([1])).item() == spread.node_world().size
    assert spread.empty(10, torch.float32).tolist() == [0.0] * 10


def test_tensors_in_different_memory_raise_mismatch(fresh: World) -> None:
    if fresh.size == 1:
        pytest.skip("one rank agrees with itself")
    windows = [fresh.empty(100_000, torch.float32) for _ in range(2)]
    for choices in ((windows[0], windows[1]), (windows[0], torch.zeros(100_000))):
        with pytest.raises(MismatchError, match="window"):
            fresh.allreduce(choices[fresh.rank == 0])
    with pytest.raises(MismatchError, match="window 0 from byte 4"):
        fresh.allreduce(windows[0][1:90_001] if fresh.rank else windows[0][:90_000])
    with pytest.raises(MismatchError, match=r"broadcast\(3 x float32, root 1, tree\)"):
        fresh.broadcast(torch.zeros(3), root=int(fresh.rank == 0))
    with pytest.raises(MismatchError, match="library"):
        fresh.allreduce(torch.zeros(3), "library" if fresh.rank else "ring")
    assert fresh.allreduce(torch.ones(3)).tolist() == [fresh.size] * 3
