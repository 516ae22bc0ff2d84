import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.progress import poll_until

from unisono.errors import CheckpointError, PackError, UsageError
from unisono.world import World


def test_rank_size_and_node(world: World) -> None:
    assert world.all_gather_object(world.rank) == list(range(world.size))
    assert world.gather_object(world.rank) == (list(range(world.size)) if world.rank == 0 else [])
    assert (world.node, world.nodes, world.supernode) == (0, 1, 0)
    assert world.placement.nodes == (tuple(range(world.size)),)
    assert repr(world) == f"World(rank={world.rank}, size={world.size}, node=0, nodes=1)"
    assert world.node_world().size == world.size


def test_split(world: World) -> None:
    half = world.split(world.rank % 2)
    members = [rank for rank in range(world.size) if rank % 2 == world.rank % 2]
    assert (half.rank, half.size) == (members.index(world.rank), len(members))
    assert half.allreduce(torch.tensor([world.rank])).item() == sum(members)
    assert half.allreduce(torch.ones(200_000)).eq(len(members)).all()
    half.barrier()
    half.free()


NO_SHARED_TENSORS = {
    "a shape": ((2, 3), torch.float32),
    "below 0": (-1, torch.float32),
    "bool": (True, torch.int8),
    "no dtype": (3, float),
    "quantized": (3, torch.quint8),
}


@pytest.mark.parametrize(("length", "dtype"), NO_SHARED_TENSORS.values(), ids=NO_SHARED_TENSORS)
def test_a_refused_length_or_dtype_leaves_the_world_usable(world: World, length: Any, dtype: Any) -> None:
    with pytest.raises(UsageError, match=rf"rank {world.rank}: empty\(.* is no number of elements and a plain torch"):
        world.empty(length, dtype)
    assert world.allreduce(torch.ones(2)).eq(world.size).all()


def test_a_length_beyond_memory_and_a_key_that_is_no_number_are_refused(world: World) -> None:
    with pytest.raises(UsageError, match=r"needs 140,737,488,355,328 bytes, and this machine has"):
        world.empty(1 << 45, torch.float32)
    with pytest.raises(UsageError, match=r"split\(0, 'a'\); a key is a number of 32 bits, or None"):
        world.split(0, "a")  # type: ignore[arg-type]
    assert world.allreduce(torch.ones(2)).eq(world.size).all()


@pytest.mark.parametrize("color", [-1, 1 << 31, 1.5, "a"])
def test_a_refused_color_leaves_the_world_usable(world: World, color: Any) -> None:
    with pytest.raises(UsageError, match=rf"rank {world.rank}: split\({color!r}\); a color is a number from 0"):
        world.split(color)
    assert world.allreduce(torch.ones(2)).eq(world.size).all()


def test_moves_and_reductions(world: World) -> None:
    receives = [torch.zeros(rank + 1) for rank in range(world.size)]
    world.all_to_all_v([torch.full((world.rank + 1,), float(rank)) for rank in range(world.size)], receives)
    assert [part.tolist() for part in receives] == [[float(world.rank)] * (rank + 1) for rank in range(world.size)]
    tensor = torch.tensor([world.rank])
    world.reduce(tensor, world.size - 1, "maximum")
    assert tensor.item() == world.rank
    world.reduce(tensor)
    assert tensor.item() == (sum(range(world.size)) if world.rank == 0 else world.rank)


def test_call_on_root_returns_the_result_on_all_ranks(world: World) -> None:
    assert world.call_on_root(lambda: {"rank": world.rank}) == {"rank": 0}


def test_call_on_root_raises_the_error_on_all_ranks(world: World) -> None:
    def fail() -> None:
        raise CheckpointError(f"on {world.rank}")

    with pytest.raises(CheckpointError, match="on 0"):
        world.call_on_root(fail)
    with pytest.raises(OSError, match="No such file"):
        world.call_on_root(Path("/nowhere/at/all").read_text)


def test_call_on_all_returns_each_result(world: World) -> None:
    assert world.call_on_all(lambda: {"rank": world.rank}) == {"rank": world.rank}
    assert world.call_on_all(lambda: None) is None


def test_call_on_all_raises_the_error_on_all_ranks(world: World) -> None:
    last = world.size - 1

    def fail() -> int:
        if world.rank == last:
            raise PackError("no room")
        return world.rank

    with pytest.raises(PackError, match=f"^rank {last}: no room$"):
        world.call_on_all(fail)
    assert world.call_on_all(lambda: world.rank) == world.rank, "all have come out of it"


def test_call_on_all_raises_the_error_of_the_first_rank(world: World) -> None:
    first = world.size // 2

    def fail() -> None:
        if world.rank >= first:
            raise (PackError if world.rank == first else CheckpointError)(f"on {world.rank}")

    with pytest.raises(PackError, match=f"^rank {first}: on {first}$"):
        world.call_on_all(fail)
    with pytest.raises(UsageError, match=r"^rank 0: .*No such file") as caught:
        world.call_on_all(Path("/nowhere/at/all").read_text)
    assert caught.type is UsageError


def test_a_freed_dup_is_not_kept(group: World) -> None:
    dup = group.dup()
    kept = weakref.ref(dup), weakref.ref(dup._group)
    dup.free()
    del dup
    group.dup()

    def left() -> list[object]:
        gc.collect()
        return [reference for reference in kept if reference() is not None]

    poll_until(left, lambda references: not references)  # another thread may hold it for a moment
