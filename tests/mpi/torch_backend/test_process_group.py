"""The process group on real ranks: every operation beside what it must give, errors, time-outs."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import allow_inflight_collective_as_graph_input_ctx

import unisono  # noqa: F401 - registers the backend
from unisono.errors import BackendError, LaunchError, TensorError, UsageError
from unisono.placement import place
from unisono.torch_backend import Options, messages
from unisono.torch_backend.arguments import UNDIVIDED
from unisono.torch_backend.process_group import ProcessGroup
from unisono.world import World

OPS = {
    dist.ReduceOp.SUM: lambda all_of: all_of.sum(0),
    dist.ReduceOp.AVG: lambda all_of: all_of.sum(0) / len(all_of),
    dist.ReduceOp.PRODUCT: lambda all_of: all_of.prod(0),
    dist.ReduceOp.MIN: lambda all_of: all_of.amin(0),
    dist.ReduceOp.MAX: lambda all_of: all_of.amax(0),
}


@pytest.fixture(scope="module", autouse=True)
def default_group() -> Iterator[None]:
    dist.init_process_group("unisono", timeout=timedelta(seconds=60))
    yield
    dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def of(owner: int, *shape: int) -> torch.Tensor:
    """What rank `owner` has."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(owner), dtype=torch.float64)


def everyone(*shape: int) -> torch.Tensor:
    return torch.stack([of(owner, *shape) for owner in range(size())])


def test_the_group_uses_the_backend() -> None:
    assert isinstance(dist.group.WORLD, ProcessGroup)
    assert dist.get_backend() == "unisono"


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_all_reduce(op: dist.ReduceOp.RedOpType, in_background: bool) -> None:
    tensor = of(rank(), 3, 1001)
    work = dist.all_reduce(tensor, op, async_op=in_background)
    if in_background:
        assert work.wait()
    torch.testing.assert_close(tensor, OPS[op](everyone(3, 1001)))


def test_factors_come_before_the_sum() -> None:
    tensor = of(rank(), 10)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.25))
    torch.testing.assert_close(tensor, everyone(10).sum(0) * 0.25)
    output, rows = torch.empty(5, dtype=torch.float64), of(rank(), 5 * size())
    dist.reduce_scatter_single(output, rows, dist._make_nccl_premul_sum(2.0))
    torch.testing.assert_close(output, everyone(5 * size()).sum(0).chunk(size())[rank()] * 2)
    torch.testing.assert_close(rows, of(rank(), 5 * size()))


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.complex64]
)
def test_dtypes(dtype: torch.dtype) -> None:
    tensor = torch.tensor([rank() % 2, 1, 0]).to(dtype)
    dist.all_reduce(tensor)
    ones = size() // 2
    assert torch.equal(tensor, torch.tensor([ones, size(), 0]).to(dtype))
    parts = [torch.zeros(3, dtype=dtype) for _ in range(size())]
    dist.all_gather(parts, torch.tensor([rank(), 1, 0]).to(dtype))
    assert torch.equal(torch.stack(parts), torch.tensor([[r, 1, 0] for r in range(size())]).to(dtype))


@pytest.mark.parametrize("dtype", UNDIVIDED)
def test_dtypes_without_averages_are_refused_before_they_change(dtype: torch.dtype) -> None:
    group, average = dist.group.WORLD, dist.ReduceOp.AVG
    together, options = [torch.ones(2), torch.ones(2, dtype=dtype)], dist.distributed_c10d.AllreduceCoalescedOptions()
    options.reduceOp = average
    for reduce in [
        lambda tensor: group.allreduce(tensor, average),
        lambda tensor: group.reduce(tensor, 0, average),
        lambda tensor: group.reduce_scatter(tensor, [tensor] * size(), average),
        lambda tensor: group.allreduce(torch.sparse_coo_tensor([[0, 1]], tensor), average),
        lambda _: group.allreduce_coalesced(together, options),
    ]:
        tensor = torch.ones(2, dtype=dtype)
        with pytest.raises(BackendError, match=rf"a tensor of {str(dtype)[6:]} cannot be averaged"):
            reduce(tensor).wait()
        assert tensor.equal(torch.ones(2, dtype=dtype))
    assert together[0].equal(torch.ones(2))


def test_bits() -> None:
    for op, expected in [(dist.ReduceOp.BAND, 8), (dist.ReduceOp.BOR, 8 | (2 * size() - 1 if size() > 2 else size()))]:
        tensor = torch.tensor([8 | rank()])
        dist.all_reduce(tensor, op)
        if op == dist.ReduceOp.BAND:
            assert int(tensor) == expected
    tensor = torch.tensor([1 << rank()])
    dist.all_reduce(tensor, dist.ReduceOp.BXOR)
    assert int(tensor) == (1 << size()) - 1


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("length", [5, 20_100])
def test_exact_sums_have_the_bits_of_a_world(
    nodes: int, length: int, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unisono.torch_backend.mpi_job import mpi_job

    monkeypatch.setattr(mpi_job().world, "placement", place([index % nodes for index in range(size())]))
    group = dist.new_group(list(range(size())), pg_options=Options(wire="exact"))
    tensor = of(rank(), size() * length) * torch.logspace(-6, 6, size() * length)
    expected = world.allreduce(tensor.clone(), wire="exact")
    summed, part, rooted = tensor.clone(), torch.empty(length, 1, dtype=tensor.dtype), tensor.clone()
    dist.all_reduce(summed, group=group)
    assert summed.equal(expected)
    dist.reduce_scatter_single(part, tensor, group=group)
    assert part.flatten().equal(expected[rank() * length :][:length])
    dist.reduce(rooted, 0, group=group)
    assert rooted.equal(tensor if rank() else expected)
    with pytest.raises(BackendError, match="does not fit"):
        dist.reduce_scatter_single(part[1:], tensor, group=group)
    count, largest = torch.tensor([rank()]), tensor.clone()
    dist.all_reduce(count, group=group)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    assert count == sum(range(size()))
    assert largest.equal(world.allreduce(tensor.clone(), op="maximum"))
    dist.destroy_process_group(group)


def test_lists_of_sizes_that_differ() -> None:
    parts = [torch.empty(index + 1, 2, dtype=torch.float64) for index in range(size())]
    dist.all_gather(parts, of(rank(), rank() + 1, 2))
    for index, part in enumerate(parts):
        assert torch.equal(part, of(index, index + 1, 2))
    output = torch.empty(rank() + 1, dtype=torch.float64)
    dist.reduce_scatter(output, [torch.full((index + 1,), 1.0 + rank()).double() for index in range(size())])
    assert torch.equal(output, torch.full((rank() + 1,), size() * (size() + 1) / 2).double())


def test_one_root() -> None:
    for root in range(size()):
        tensor = of(rank(), 7)
        dist.broadcast(tensor, root)
        assert torch.equal(tensor, of(root, 7))
        tensor = of(rank(), 7)
        dist.reduce(tensor, root)
        if rank() == root:
            torch.testing.assert_close(tensor, everyone(7).sum(0))
        parts = [torch.empty(7, dtype=torch.float64) for _ in range(size())] if rank() == root else None
        dist.gather(of(rank(), 7), parts, root)
        assert parts is None or torch.equal(torch.stack(parts), everyone(7))
        output = torch.empty(7, dtype=torch.float64)
        dist.scatter(output, list(everyone(7)) if rank() == root else None, root)
        assert torch.equal(output, of(rank(), 7))


def test_every_signature_of_a_process_group() -> None:
    group, own, limit = dist.group.WORLD, of(rank(), 2), timedelta(seconds=50)
    everything, total = list(everyone(2)), everyone(2).sum(0)
    root = size() - 1
    for call, expected in [
        (group.allreduce, total),
        (lambda t: group.allreduce(t, timeout=limit), total),
        (lambda t: group.allreduce([t], dist.ReduceOp.MAX), everyone(2).amax(0)),
        (lambda t: group.allreduce([t], op=dist.ReduceOp.MAX, timeout=limit), everyone(2).amax(0)),
        (lambda t: group.broadcast(t, root), everything[root]),
        (lambda t: group.broadcast(t, root=root, timeout=limit), everything[root]),
        (lambda t: group.reduce(t, root), total if rank() == root else own),
        (lambda t: group.reduce(t, root, dist.ReduceOp.MAX, limit), everyone(2).amax(0) if rank() == root else own),
        (lambda t: group.reduce_scatter(t, everything), everything[rank()] * size()),
        (lambda t: group.reduce_scatter(t, everything, dist.ReduceOp.MAX), everything[rank()]),
        (lambda t: group.scatter(t, everything if rank() == root else [], root), own),
    ]:
        tensor = own.clone()
        assert call(tensor).wait()
        torch.testing.assert_close(tensor, expected)
    outputs = [torch.zeros(2, dtype=own.dtype) for _ in everything]
    group.allgather(outputs, own, limit).wait()
    assert torch.stack(outputs).equal(everyone(2))
    outputs = [torch.zeros(2, dtype=own.dtype) for _ in everything] if rank() == root else []
    group.gather(outputs, own, root).wait()
    assert not outputs or torch.stack(outputs).equal(everyone(2))
    numbers, received = torch.arange(size()), torch.zeros(size(), dtype=torch.int64)
    group.alltoall_base(received, numbers, [], [], limit).wait()
    assert received.eq(rank()).all()
    assert group.barrier(timeout=limit).wait()
    assert group.barrier(limit).wait()
    with pytest.raises(TensorError, match="allreduce with 'sum'; after the tensors"):
        group.allreduce(own, "sum")


def test_what_is_refused() -> None:
    with pytest.raises(UsageError, match=r"pg_options = \{'wire': 'bfloat16'\}; it is"):
        dist.new_group(list(range(size())), pg_options={"wire": "bfloat16"})
    with pytest.raises(BackendError, match="can't be cast"):
        dist.reduce(torch.ones(3, dtype=torch.int64), 0, dist._make_nccl_premul_sum(0.5))
    if size() > 1:
        lengths = [1 + (index + rank()) % size() for index in range(size())]
        with pytest.raises(BackendError, match="give the same on all ranks"):
            dist.reduce_scatter(torch.zeros(lengths[rank()]), [torch.ones(length) for length in lengths])
        late = dist.irecv(torch.ones(1), (rank() + 1) % size())
        with pytest.raises(BackendError, match=r"Timed out waiting 0\.1 s"):
            late.wait(timedelta(seconds=0.1))
        dist.barrier()
        dist.send(torch.ones(1), (rank() - 1) % size())
        late.wait()


@pytest.mark.parametrize("peer", [-2, -1, "size"])
def test_a_message_to_no_rank_is_refused(peer: int | str) -> None:
    """MPI takes -1 for nobody, -2 for anybody."""
    other = peer if isinstance(peer, int) else size()
    for post in (dist.send, dist.recv):
        with pytest.raises(BackendError, match=rf"a message to or from rank {other}; the ranks of group 0 are 0 to"):
            post(torch.ones(1), other)


def test_a_time_out_of_a_message_runs_from_the_first_wait() -> None:
    if size() == 1:
        pytest.skip("one rank waits for nobody")
    group = dist.new_group(list(range(size())), timedelta(seconds=0.2))
    filled = torch.zeros(1)
    early = dist.irecv(filled, (rank() + 1) % size(), group)
    time.sleep(0.4)
    dist.isend(torch.ones(1), (rank() - 1) % size(), group)
    dist.barrier()
    early.wait()
    assert filled.item() == 1
    with pytest.raises(BackendError, match=r"Timed out after 0\.2 s"):
        dist.irecv(torch.zeros(1), (rank() + 1) % size(), group).wait()
    dist.barrier()


def test_a_message_that_is_asked_for_again_and_again_times_out() -> None:
    if size() == 1:
        pytest.skip("one rank waits for nobody")
    group, never = dist.new_group(list(range(size())), timedelta(seconds=0.2)), threading.Event()
    late = dist.irecv(torch.zeros(1), (rank() + 1) % size(), group)
    while not late.is_completed():
        never.wait(1e-3)
    with pytest.raises(BackendError, match=r"Timed out after 0\.2 s"):
        late.wait()
    dist.barrier()


def test_a_wait_that_a_signal_interrupts_can_be_made_again() -> None:
    """And the message is received, wherever it comes in between."""
    if size() == 1:
        pytest.skip("one rank waits for nobody")
    late, arrived = dist.irecv(place := torch.zeros(1), (rank() + 1) % size()), threading.Event()

    def ring(*_: object) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(InterruptedError):
            late.wait()
    finally:
        signal.signal(signal.SIGALRM, before)
    dist.barrier()
    dist.send(torch.ones(1), (rank() - 1) % size())
    while not late.is_completed():  # polled by nobody but the background thread
        arrived.wait(1e-3)
    late.wait()
    assert place.item() == 1


def test_flat_tensors() -> None:
    output = torch.empty(size() * 6, dtype=torch.float64)
    dist.all_gather_single(output, of(rank(), 6))
    assert torch.equal(output, everyone(6).flatten())
    chunk = torch.empty(6, dtype=torch.float64)
    dist.reduce_scatter_single(chunk, of(rank(), 6 * size()), dist.ReduceOp.AVG)
    torch.testing.assert_close(chunk, everyone(6 * size()).mean(0).chunk(size())[rank()])
    swapped = torch.empty(6 * size(), dtype=torch.float64)
    dist.all_to_all_single(swapped, of(rank(), 6 * size()))
    assert torch.equal(swapped, torch.cat([row.chunk(size())[rank()] for row in everyone(6 * size())]))


def test_tensors_together() -> None:
    tensors = [of(rank(), 5), of(rank(), 2, 3), of(rank(), 1)]
    dist.group.WORLD.allreduce_coalesced(tensors).wait()
    torch.testing.assert_close(tensors[0], everyone(5).sum(0))
    torch.testing.assert_close(tensors[1], everyone(2, 3).sum(0))


def test_sparse_sums() -> None:
    own = torch.sparse_coo_tensor([[rank(), 9]], torch.tensor([1.0, 2.0]), (10,))
    dist.all_reduce(own)
    expected = torch.zeros(10)
    expected[: size()] += 1
    expected[9] += 2 * size()
    assert torch.equal(own.to_dense(), expected)


def test_messages() -> None:
    if size() == 1:
        pytest.skip("one rank has nobody to write to")
    ahead, behind = (rank() + 1) % size(), (rank() - 1) % size()
    big, small = torch.empty(300_000, dtype=torch.float64), torch.empty(3, dtype=torch.float64)
    works = [dist.irecv(small, behind, tag=7), dist.irecv(big, behind, tag=5)]
    works += [dist.isend(of(rank(), 300_000), ahead, tag=5), dist.isend(of(rank(), 3), ahead, tag=7)]
    for work in works:
        work.wait()
    assert torch.equal(big, of(behind, 300_000))
    assert torch.equal(small, of(behind, 3))
    if rank() == 0:
        seen = {dist.recv(small) for _ in range(size() - 1)}
        assert seen == set(range(1, size()))
    else:
        dist.send(small, 0)


def test_a_message_that_does_not_fit() -> None:
    if size() == 1:
        pytest.skip("one rank has nobody to write to")
    if rank() == 0:
        dist.send(torch.ones(3), 1)
        dist.send(torch.ones(3), 1)
    if rank() == 1:
        with pytest.raises(RuntimeError, match=r"received 12 bytes, but the tensor has 20"):
            dist.recv(torch.ones(5), 0)
        with pytest.raises(RuntimeError, match="recv from rank 0"):
            dist.recv(torch.ones(2), 0)
    dist.barrier()


def received_in_background() -> tuple[Any, torch.Tensor]:
    """A receive that nobody waits for, of a tensor that is not contiguous, and the tensor."""
    tensor = torch.zeros(4, 4).t()
    work: Any = dist.irecv(tensor, (rank() - 1) % size())
    dist.barrier()
    dist.send(torch.full((4, 4), float(rank())), (rank() + 1) % size())
    end = time.monotonic() + 20
    while not work.is_completed() and time.monotonic() < end:
        time.sleep(1e-3)
    return work, tensor


def test_the_background_fills_inference_tensors_and_keeps_errors_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    if size() == 1:
        pytest.skip("one rank has nobody to write to")

    def fail(*arguments: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(messages, "copy_behind", fail)
        work, _ = received_in_background()
    with pytest.raises(BackendError, match=r"recv from rank .*CUDA error: an illegal"):
        work.wait()
    with torch.inference_mode():
        work, tensor = received_in_background()
    work.wait()
    assert tensor.eq((rank() - 1) % size()).all()


def test_futures_give_tensors_and_callbacks_may_wait() -> None:
    def again(future: torch.futures.Future) -> torch.Tensor:
        (tensor,) = future.value()
        return dist.all_reduce(tensor, async_op=True).get_future().wait()[0]

    work = dist.all_reduce(torch.ones(4), async_op=True)
    assert torch.equal(work.get_future().then(again).wait(), torch.full((4,), float(size() ** 2)))


def test_wait_tensor_waits_for_a_collective_in_flight() -> None:
    with allow_inflight_collective_as_graph_input_ctx():
        if rank() == size() - 1:
            time.sleep(0.3)
        tensor = torch.ones(4)
        dist.all_reduce(tensor, async_op=True)
        assert set(torch.ops._c10d_functional.wait_tensor(tensor).tolist()) == {size()}
        if size() > 1:
            (dist.all_reduce if rank() else partial(dist.broadcast, src=0))(tensor, async_op=True)
            with pytest.raises(BackendError, match="broadcast"):
                torch.ops._c10d_functional.wait_tensor(tensor)


def test_wait_tensor_waits_for_a_message_in_flight() -> None:
    if size() == 1:
        pytest.skip("needs two ranks")
    given, received = torch.full((4,), float(rank())), torch.full((4,), -1.0)
    with allow_inflight_collective_as_graph_input_ctx():
        dist.irecv(received, (rank() - 1) % size())
        if rank() == size() - 1:
            time.sleep(0.3)
        dist.isend(given, (rank() + 1) % size())
        assert set(torch.ops._c10d_functional.wait_tensor(received).tolist()) == {float((rank() - 1) % size())}
        torch.ops._c10d_functional.wait_tensor(given)


def test_rows_that_ranks_do_not_divide_need_split_sizes() -> None:
    if size() == 1:
        pytest.skip("one rank divides any number")
    tensor = torch.ones(size() + 1, 2 * size())
    with pytest.raises(BackendError, match=r"all_to_all of .*: \d ranks do not divide its rows: give split sizes"):
        dist.all_to_all_single(torch.empty_like(tensor), tensor)


def all_reduced_in_background(tensor: torch.Tensor) -> torch.Tensor:
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    return tensor + work.is_completed()


def passed_barrier(tensor: torch.Tensor) -> torch.Tensor:
    dist.barrier()
    return tensor + 1


def passed_on(tensor: torch.Tensor) -> torch.Tensor:
    if size() > 1 and rank() == 0:
        dist.send(tensor, 1)
    elif rank() == 1:
        dist.recv(tensor, 0)
    return tensor + 1


def called_in_place(call: Callable[..., Any], tensor: torch.Tensor) -> torch.Tensor:
    call(tensor, 0)
    return tensor + 1


COMPILED = {
    "all_reduce": all_reduced_in_background,
    "barrier": passed_barrier,
    "send, recv": passed_on,
    "broadcast": partial(called_in_place, dist.broadcast),
    "reduce": partial(called_in_place, dist.reduce),
}


@pytest.mark.parametrize("name", COMPILED)
def test_calls_in_a_compiled_function_are_made_as_they_are(name: str) -> None:
    expected = COMPILED[name](of(rank(), 4))
    assert torch.equal(torch.compile(COMPILED[name], backend="eager")(of(rank(), 4)), expected)


def test_mismatched_calls_are_reported() -> None:
    if size() == 1:
        pytest.skip("one rank agrees with itself")
    for in_background in (False, True):
        tensor = torch.ones(4)
        with pytest.raises(BackendError, match=r"(?s)allreduce\(4 x float32.*broadcast\(4|broadcast\(4.*allreduce\(4"):
            if rank() == 1:
                work = dist.broadcast(tensor, 0, async_op=in_background)
            else:
                work = dist.all_reduce(tensor, async_op=in_background)
            work.wait()
    dist.all_reduce(tensor)


def test_a_timeout_names_the_missing_ranks() -> None:
    if size() == 1:
        pytest.skip("one rank waits for nobody")
    ranks = list(range(size()))
    late, done = dist.new_group(ranks), dist.new_group(ranks)
    dist.all_reduce(torch.ones(1), group=late)  # as late as ranks may be on a busy machine
    late.set_timeout(timedelta(seconds=0.5))
    if rank() != 1:
        with pytest.raises(
            BackendError, match=r"all_reduce, number 2 .* Timed out after 0\.5 s: .* missing: rank 1, which"
        ):
            dist.all_reduce(torch.ones(2), group=late)
        with pytest.raises(BackendError, match="number 2"):  # the group is of no more use
            dist.all_reduce(torch.ones(2), group=late)
    dist.barrier(done)


def test_a_group_beside_ends_with_the_group() -> None:
    group, ended = dist.new_group(list(range(size()))), list[str]()
    group._beside["cuda"] = SimpleNamespace(shutdown=lambda: ended.append("shutdown"))
    dist.destroy_process_group(group)
    assert ended == ["shutdown"]


def test_a_group_larger_than_the_mpi_job(world: World) -> None:
    from unisono.torch_backend.mpi_job import mpi_job

    with pytest.raises(LaunchError, match=f"mpiexec -n {world.size + 1} python"):
        mpi_job().members(SimpleNamespace(store=None, group_rank=0, group_size=world.size + 1))


def test_a_group_that_a_rank_does_not_create() -> None:
    if size() == 1:
        pytest.skip("one rank waits for nobody")
    everyone = list(range(size()))
    for _ in range(2):  # of the same name
        dist.destroy_process_group(dist.new_group(everyone, use_local_synchronization=True))
    for late in (False, True):
        dist.barrier()
        if (rank() == 1) == late:
            with pytest.raises(BackendError, match=r"ranks \[1\] of the group have not|it has failed on another rank"):
                dist.new_group(everyone, timedelta(seconds=0.3), use_local_synchronization=True)
    dist.barrier()


def test_a_monitored_barrier_names_the_missing_ranks() -> None:
    if size() == 1:
        pytest.skip("one rank waits for nobody")
    group: Any = dist.group.WORLD
    for _ in range(20):
        group.monitored_barrier(timedelta(seconds=20))
    assert len(group._messages._posted) < 20, "what has been sent is dropped"
    again = dist.new_group(list(range(size())))
    if rank() == 0:
        with pytest.raises(BackendError, match="Rank 1 failed to pass monitoredBarrier in 300 ms"):
            again.monitored_barrier(timedelta(seconds=0.3))
    elif rank() != 1:
        with pytest.raises(BackendError, match="rank 0"):
            again.monitored_barrier(timedelta(seconds=0.6))
    dist.barrier()
    if rank() == 1:
        with pytest.raises(BackendError, match="rank 0"):
            again.monitored_barrier(timedelta(seconds=0.1))
    dist.barrier()
    if rank() == 1:
        time.sleep(0.4)
        dist.send(torch.ones(1), 0)
    again.monitored_barrier(timedelta(seconds=20))
    if rank() == 0:
        dist.irecv(torch.ones(1), 1).wait(timedelta(seconds=0.2))  # sent by rank 1 before it reached the barrier
    dist.barrier()


def test_a_group_of_two() -> None:
    if size() < 3:
        pytest.skip("two ranks are all")
    pair = dist.new_group([2, 0])
    if rank() in (0, 2):
        tensor = of(rank(), 6)
        dist.all_reduce(tensor, group=pair)
        torch.testing.assert_close(tensor, of(0, 6) + of(2, 6))
        dist.destroy_process_group(pair)


def test_objects() -> None:
    everything: list[object] = [None] * size()
    dist.all_gather_object(everything, {"rank": rank(), "text": "x" * rank()})
    assert everything == [{"rank": member, "text": "x" * member} for member in range(size())]


@pytest.mark.parametrize("in_background", [False, True])
def test_the_profiler_sees_operations_with_their_shapes(in_background: bool) -> None:
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        work = dist.all_reduce(torch.ones(3, 2), async_op=in_background)
        if in_background:
            work.wait()
    (event,) = [event for event in profile.function_events if event.name == "unisono:all_reduce"]
    assert event.input_shapes == [[3, 2]]
    assert event.is_async
