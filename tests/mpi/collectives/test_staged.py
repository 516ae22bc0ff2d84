"""Collectives of tensors on a device, beside the same of tensors on the host."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from unisono.device import PIECE_BYTES
from unisono.errors import TensorError
from unisono.world import World

close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


def own(world: World, length: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return (torch.arange(length) % 11 + world.rank).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("length", [0, 1, 1000, PIECE_BYTES // 4 + 3])
def test_allreduce(world: World, device: torch.device, length: int, dtype: torch.dtype) -> None:
    tensor, right = own(world, length, dtype).to(device), own(world, length, dtype)
    assert world.allreduce(tensor) is tensor
    close(tensor.cpu(), world.allreduce(right))


def test_allreduce_of_strides_a_wire_and_another_op(world: World, device: torch.device) -> None:
    tensor, right = own(world, 12).view(3, 4).to(device).t(), own(world, 12).view(3, 4).t()
    close(world.allreduce(tensor).cpu(), world.allreduce(right))
    close(world.allreduce(tensor, op="maximum").cpu(), world.allreduce(right, op="maximum"))
    tensor, right = own(world, 999, torch.float32).to(device) / 7, own(world, 999, torch.float32) / 7
    close(world.allreduce(tensor, wire="float16").cpu(), world.allreduce(right, wire="float16"))


def test_what_the_stream_computes_next_is_not_waited_for(world: World, device: torch.device) -> None:
    """The sum has what was computed before it; what follows it sees the sum."""
    tensor = torch.zeros(1000, device=device)
    for _ in range(5):
        tensor.add_(1)
        world.allreduce(tensor)
        tensor.div_(world.size)
    close(tensor.cpu(), torch.full((1000,), 5.0))


def test_other_collectives(world: World, device: torch.device) -> None:
    size = world.size
    tensor, place = own(world, 4 * size), slice(4 * world.rank, 4 * world.rank + 4)
    close(world.reduce_scatter(tensor.to(device)).cpu(), world.reduce_scatter(tensor))
    close(world.all_to_all(tensor.to(device)).cpu(), world.all_to_all(tensor))
    part, parts = torch.empty(4, dtype=tensor.dtype, device=device), torch.empty_like(tensor, device=device)
    close(world.reduce_scatter(tensor.to(device), out=part).cpu(), world.reduce_scatter(tensor))
    close(world.all_to_all(tensor.to(device), out=parts).cpu(), world.all_to_all(tensor))
    close(part.cpu(), world.reduce_scatter(tensor))
    close(parts.cpu(), world.all_to_all(tensor))
    there, here = tensor.to(device), tensor.clone()
    world.all_gather(there[place], there)
    world.all_gather(here[place], here)
    close(there.cpu(), here)
    for root in range(size):
        there, here = own(world, 5).to(device), own(world, 5)
        close(world.broadcast(there, root).cpu(), world.broadcast(here, root))
        there, here = own(world, 5).to(device), own(world, 5)
        world.reduce(there, root)
        world.reduce(here, root)
        close(there.cpu(), here)


def test_all_to_all_v(world: World, device: torch.device) -> None:
    sends = [torch.full((peer + 1,), float(world.rank)) for peer in range(world.size)]
    there, here = ([torch.empty(world.rank + 1) for _ in sends] for _ in range(2))
    there = [tensor.to(device) for tensor in there]
    world.all_to_all_v([tensor.to(device) for tensor in sends], there)
    world.all_to_all_v(sends, here)
    for result, right in zip(there, here, strict=True):
        close(result.cpu(), right)


def test_a_call_with_tensors_on_two_devices_is_refused(world: World, device: torch.device) -> None:
    shard, out = torch.zeros(2, device=device), torch.zeros(2 * world.size)
    with pytest.raises(TensorError, match=f"all_gather: tensors on {device} and on cpu; move all to one device"):
        world.all_gather(shard, out)


def test_an_output_that_shares_memory_is_refused(world: World, device: torch.device) -> None:
    with pytest.raises(TensorError, match="allreduce: several elements of an output share memory"):
        world.allreduce(torch.zeros(1, device=device).expand(3))
