"""GPU tensors: staged, or passed to an MPI library; without a GPU, tensors of the meta device take their place."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from unisono.collectives.staged import Staging, refuse_shared
from unisono.errors import TensorError
from unisono.torch_backend.devices import can_pass_directly, on_any_device


class Group:
    """Group whose only operation returns its arguments."""

    @on_any_device
    def allreduce(self, tensors: list[torch.Tensor], opts: object = None) -> list[torch.Tensor]:
        """As it came."""
        return tensors


def test_cpu_tensors_are_passed_unchanged() -> None:
    tensors = [torch.ones(2)]
    assert Group().allreduce(tensors) is tensors


def test_a_tensor_has_one_copy_however_often_it_is_given() -> None:
    staging, tensor = Staging([]), torch.empty(3, device="meta")
    staging._pairs[id(tensor)] = tensor, torch.ones(3)
    first, (second,) = staging.host(tensor), staging.host([tensor])
    assert first is second
    assert staging.device([first])[0] is tensor
    assert staging.host(torch.zeros(1)).device.type == "cpu"


def test_inputs_are_not_copied_back() -> None:
    """In place, the output lies in the input's memory: the input's copy has the old values."""
    whole = torch.zeros(6)
    chunk = whole[2:4]
    staging = Staging([chunk])
    staging._pairs = {id(chunk): (chunk, torch.ones(2)), id(whole): (whole, torch.full((6,), 7.0))}
    staging.copy_back()
    assert whole.tolist() == [0, 0, 1, 1, 0, 0]


def test_outputs_that_share_memory_are_refused() -> None:
    tensor = torch.zeros(4)
    refuse_shared("all_gather", [tensor[:2], tensor[2:]])
    with pytest.raises(TensorError, match="all_gather: output 1 and output 0 share memory"):
        refuse_shared("all_gather", [tensor[:3], tensor[2:]])
    with pytest.raises(TensorError, match="broadcast: several elements of an output share memory"):
        refuse_shared("broadcast", [torch.zeros(1).expand(3)])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_tensor_is_copied_to_the_host_and_back() -> None:
    tensor = torch.ones(5, device="cuda")
    staging = Staging([tensor])
    copy = staging.host(tensor)
    assert copy.is_pinned()
    copy.mul_(3)
    staging.copy_back()
    assert tensor.tolist() == [3] * 5


def options(op: dist.ReduceOp.RedOpType) -> dist.AllreduceOptions:
    chosen = dist.AllreduceOptions()
    chosen.reduceOp = dist.ReduceOp(op)
    return chosen


def test_plain_tensors_of_dtypes_known_to_mpi() -> None:
    assert can_pass_directly("allreduce", ([torch.ones(3)],))
    assert can_pass_directly("allreduce", ([torch.ones(3)], options(dist.ReduceOp.AVG)))
    assert can_pass_directly("reduce_scatter_single", (torch.ones(1), torch.ones(3)))


@pytest.mark.parametrize("name", ["broadcast", "all_gather_single"])
def test_any_dtype_without_a_reduction(name: str) -> None:
    assert can_pass_directly(name, (torch.ones(3, dtype=torch.bfloat16), torch.ones(1, dtype=torch.bool)))


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64])
def test_sums_that_the_device_does_not_compute_are_staged(dtype: torch.dtype) -> None:
    assert not can_pass_directly("allreduce", ([torch.ones(3, dtype=dtype)],))
    assert not can_pass_directly("allreduce", ([torch.ones(3, dtype=torch.int32)], options(dist.ReduceOp.BAND)))
    assert can_pass_directly("allreduce", ([torch.ones(3)], options(dist.ReduceOp.MIN)))


def test_non_contiguous_tensors_are_staged() -> None:
    assert not can_pass_directly("broadcast", ([torch.ones(3, 4).t()],))
    assert not can_pass_directly("allreduce", ([torch.ones(3, 4)[:, 1]],))
    assert not can_pass_directly("allreduce", ([torch.ones(3).to_sparse()],))
    assert not can_pass_directly("broadcast", ([torch.ones(3, dtype=torch.complex64).conj()],))
