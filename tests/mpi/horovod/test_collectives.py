"""Horovod's collectives: results, in place and not, gradients, and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import unisono.horovod as hvd
from unisono.errors import MismatchError, UnisonoError, UsageError


def of(rank: int, rows: int = 6) -> torch.Tensor:
    return (torch.arange(rows * 2.0) * (rank + 1)).view(rows, 2)


def total(rows: int = 6) -> torch.Tensor:
    return torch.stack([of(rank, rows) for rank in range(hvd.size())]).sum(0)


def test_ranks_and_nodes() -> None:
    assert hvd.is_initialized()
    assert 0 <= hvd.rank() < hvd.size()
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), hvd.size())
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.is_homogeneous()
    assert hvd.mpi_built()
    assert not hvd.nccl_built()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32])
def test_allreduce_gives_the_mean_and_leaves_its_tensor(dtype: torch.dtype) -> None:
    own = of(hvd.rank()).to(dtype)
    before = own.clone()
    mean = total() / hvd.size()
    assert torch.equal(hvd.allreduce(own), mean.trunc().to(dtype) if dtype is torch.int32 else mean.to(dtype))
    assert torch.equal(own, before)
    assert torch.equal(hvd.allreduce(own, op=hvd.Sum), total().to(dtype))
    assert torch.equal(hvd.allreduce(own, average=False), total().to(dtype))
    assert hvd.allreduce_(own, op=hvd.Sum) is own
    assert torch.equal(own, total().to(dtype))


def test_reductions_and_factors() -> None:
    tensor = torch.tensor([float(hvd.rank() + 1)])
    ranks = range(1, hvd.size() + 1)
    assert hvd.allreduce(tensor, op=hvd.Max).item() == hvd.size()
    assert hvd.allreduce(tensor, op=hvd.Min).item() == 1
    assert hvd.allreduce(tensor, op=hvd.Product).item() == torch.tensor(list(ranks)).prod()
    assert hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0).item() == 2 * sum(ranks)
    with pytest.raises(UsageError, match="average or op"):
        hvd.allreduce(tensor, average=True, op=hvd.Sum)


def test_asynchronous_collectives_are_carried_out_in_order() -> None:
    tensors = [of(hvd.rank()) + index for index in range(5)]
    handles = [hvd.allreduce_async(tensor, op=hvd.Sum) for tensor in tensors]
    sums = [hvd.synchronize(handle) for handle in handles]
    assert all(hvd.poll(handle) for handle in handles)
    assert all(torch.equal(summed, total() + index * hvd.size()) for index, summed in enumerate(sums))
    assert torch.equal(hvd.grouped_allreduce(tensors, op=hvd.Sum)[3], sums[3])


def test_allgather_takes_different_numbers_of_rows() -> None:
    gathered = hvd.allgather(of(hvd.rank(), hvd.rank() + 1))
    assert torch.equal(gathered, torch.cat([of(rank, rank + 1) for rank in range(hvd.size())]))
    with pytest.raises(UsageError, match="scalar"):
        hvd.allgather(torch.tensor(1.0))


def test_broadcast() -> None:
    root = hvd.size() - 1
    own = of(hvd.rank())
    assert torch.equal(hvd.broadcast(own, root), of(root))
    assert torch.equal(own, of(hvd.rank()))
    assert torch.equal(hvd.broadcast_(own, root), of(root))
    assert torch.equal(own, of(root))
    with pytest.raises(UsageError, match="the ranks are 0 to"):
        hvd.broadcast(own, hvd.size())


def test_alltoall() -> None:
    size, rank = hvd.size(), hvd.rank()
    assert torch.equal(hvd.alltoall(torch.arange(size) + 10 * rank), 10 * torch.arange(size) + rank)
    sent = torch.full((size * (rank + 1),), rank)
    received, sizes = hvd.alltoall(sent, splits=torch.full((size,), rank + 1, dtype=torch.int32))
    assert sizes.tolist() == list(range(1, size + 1))
    assert received.tolist() == [source for source in range(size) for _ in range(source + 1)]
    with pytest.raises(UsageError, match="do not cut"):
        hvd.alltoall(sent, splits=[1] * (size + 1))
    if size > 1:  # one rank's rows: all learn of them
        with pytest.raises(UsageError, match=f"rank 1: alltoall: {size} ranks do not divide {size + 1} rows"):
            hvd.alltoall(torch.ones(size + (rank == 1)))


@pytest.mark.parametrize("rows", [1, 4, 12, 13])
def test_reducescatter_cuts_rows_where_horovod_does(rows: int) -> None:
    size, rank = hvd.size(), hvd.rank()
    parts = total(rows).tensor_split(size)
    assert torch.equal(hvd.reducescatter(of(rank, rows), op=hvd.Sum), parts[rank])
    assert torch.allclose(hvd.reducescatter(of(rank, rows)), parts[rank] / size)


def test_collectives_can_be_differentiated() -> None:
    size, rank = hvd.size(), hvd.rank()
    own = torch.ones(3, requires_grad=True)
    (hvd.allreduce(own, op=hvd.Sum) * (rank + 1)).sum().backward()
    assert own.grad is not None
    assert own.grad.tolist() == [sum(range(1, size + 1))] * 3
    rows = torch.ones(rank + 1, 2, requires_grad=True)
    (hvd.allgather(rows) * (rank + 1)).sum().backward()
    assert rows.grad is not None
    assert rows.grad.eq(sum(range(1, size + 1)) / size).all()
    rooted = torch.ones(3, requires_grad=True)
    (hvd.broadcast(rooted, 0) * (rank + 1)).sum().backward()
    assert rooted.grad is not None
    assert rooted.grad.tolist() == [0.0 if rank else sum(range(1, size + 1)) / size] * 3
    grouped = [torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)]
    sum(tensor.sum() for tensor in hvd.grouped_allreduce(grouped, op=hvd.Sum)).backward()
    assert all(tensor.grad is not None and tensor.grad.eq(size).all() for tensor in grouped)
    parts = torch.ones(size, requires_grad=True)
    (hvd.alltoall(parts) * (rank + 1)).sum().backward()
    assert parts.grad is not None
    assert parts.grad.tolist() == list(range(1, size + 1))
    cut = torch.ones(2 * size, requires_grad=True)
    (hvd.reducescatter(cut) * (rank + 1)).sum().backward()
    assert cut.grad is not None
    assert cut.grad.tolist() == [float(1 + index // 2) for index in range(2 * size)]


def test_integers_are_scaled_exactly_and_bools_have_no_mean() -> None:
    large = torch.tensor([2**40 + 1])
    assert hvd.allreduce(large, op=hvd.Max, postscale_factor=2.0).item() == 2**41 + 2
    assert hvd.allreduce(torch.tensor([3]), op=hvd.Max, postscale_factor=1.5).item() == 4
    size, rows = hvd.size(), 2 * hvd.size()
    for after in (2.0, 2.5, 100.0):
        mean = int(after * sum(range(1, size + 1)) / size)
        assert hvd.allreduce(torch.tensor([1 + hvd.rank()]), postscale_factor=after).item() == mean
        assert hvd.reducescatter(torch.full((rows,), 1 + hvd.rank()), postscale_factor=after).tolist() == [mean, mean]
    assert hvd.allreduce(torch.tensor([True]), op=hvd.Min).item() is True
    bools = torch.ones(size, dtype=torch.bool)
    for reduce in (hvd.allreduce, hvd.reducescatter):
        with pytest.raises(UsageError, match=r"of torch\.bool by AVERAGE: bools have no mean"):
            reduce(bools)
        with pytest.raises(UsageError, match=r"of torch\.bool by SUM, prescale 0\.5: bools"):
            reduce(bools, op=hvd.Sum, prescale_factor=0.5)


def test_shapes_and_names_are_compared() -> None:
    if hvd.size() == 1:
        return
    shape = (2, 3) if hvd.rank() else (3, 2)
    with pytest.raises(MismatchError, match="allreduce of 'loss', rows of"):
        hvd.allreduce(torch.zeros(shape), name="loss")


@pytest.mark.parametrize(
    "options",
    [lambda rank: {"op": hvd.Sum if rank else hvd.Average}, lambda rank: {"postscale_factor": 1.0 + rank}],
)
def test_ops_and_factors_are_compared(options: Callable[[int], dict[str, Any]]) -> None:
    if hvd.size() == 1:
        return
    for reduce in (hvd.allreduce, hvd.reducescatter, lambda tensor, **named: hvd.grouped_allreduce([tensor], **named)):
        with pytest.raises(MismatchError, match=r"AVERAGE|postscale 2\.0"):
            reduce(torch.ones(4), **options(hvd.rank()))


def test_an_error_that_nobody_waits_for_is_raised_by_the_next_call() -> None:
    handle = hvd.allreduce_async(torch.zeros(2, dtype=torch.complex128), op=hvd.Max)
    while not hvd.poll(handle):
        pass
    with pytest.raises(UnisonoError):
        hvd.barrier()
    hvd.barrier()


def test_an_object_that_cannot_be_pickled_is_an_error_on_every_rank() -> None:
    with pytest.raises(UsageError, match="rank 0: the object cannot be pickled"):
        hvd.broadcast_object(lambda: 1)
    with pytest.raises(UsageError, match="the ranks are"):
        hvd.broadcast_object(1, hvd.size())


def test_functions_need_a_session() -> None:
    hvd.shutdown()
    assert not hvd.is_initialized()
    with pytest.raises(UsageError, match=r"hvd\.init"):
        hvd.rank()


def test_objects() -> None:
    assert hvd.broadcast_object({"of": hvd.rank()}, hvd.size() - 1) == {"of": hvd.size() - 1}
    assert hvd.allgather_object("x" * hvd.rank()) == ["x" * rank for rank in range(hvd.size())]
    hvd.barrier()


@pytest.mark.parametrize("name", ["allreduce", "reducescatter", "allgather", "broadcast", "alltoall"])
def test_second_derivatives(name: str) -> None:
    """With y = x^2 on all ranks, the first of y^3 is 6 x^5. By Horovod's rules gradients of copies are averaged."""
    own = torch.full((hvd.size(),), 2.0, dtype=torch.float64, requires_grad=True)
    collective = getattr(hvd, name)
    result = collective(own * own, 0) if name == "broadcast" else collective(own * own)
    (first,) = torch.autograd.grad((result**3).sum(), own, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), own)
    counts = name != "broadcast" or hvd.rank() == 0
    through = 24 / hvd.size() if name in ("allgather", "broadcast") else 24
    torch.testing.assert_close(first.detach(), counts * 6 * own.detach() ** 5)
    torch.testing.assert_close(second, counts * (6 + through) * own.detach() ** 4)
