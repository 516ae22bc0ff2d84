"""Staging, on tensors that are not the host's: here those of the meta device stand in for a GPU's where they can."""

from __future__ import annotations

import pytest
import torch

from unisono.errors import TensorError
from unisono.torch_backend.devices import Staging, on_any_device, refuse_shared


class Group:
    """A group whose only operation says what it was given."""

    @on_any_device
    def allreduce(self, tensors: list[torch.Tensor], opts: object = None) -> list[torch.Tensor]:
        """As it came."""
        return tensors


def test_tensors_of_the_host_go_straight_through() -> None:
    tensors = [torch.ones(2)]
    assert Group().allreduce(tensors) is tensors


def test_a_tensor_has_one_copy_however_often_it_is_given() -> None:
    staging, tensor = Staging([]), torch.empty(3, device="meta")
    staging._pairs[id(tensor)] = tensor, torch.ones(3)
    first, (second,) = staging.host(tensor), staging.host([tensor])
    assert first is second
    assert staging.device([first])[0] is tensor
    assert staging.host(torch.zeros(1)).device.type == "cpu"


def test_what_was_read_is_not_copied_back() -> None:
    """In place, the output lies in the input's memory: the input's copy has the old values."""
    whole = torch.zeros(6)
    chunk = whole[2:4]
    staging = Staging([chunk])
    staging._pairs = {id(chunk): (chunk, torch.ones(2)), id(whole): (whole, torch.full((6,), 7.0))}
    staging.back()
    assert whole.tolist() == [0, 0, 1, 1, 0, 0]


def test_outputs_that_share_memory_are_refused() -> None:
    tensor = torch.zeros(4)
    refuse_shared("all_gather", [tensor[:2], tensor[2:]])
    with pytest.raises(TensorError, match="all_gather: output 1 and output 0 share memory"):
        refuse_shared("all_gather", [tensor[:3], tensor[2:]])
    with pytest.raises(TensorError, match="broadcast: several elements of an output share memory"):
        refuse_shared("broadcast", [torch.zeros(1).expand(3)])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_s_tensor_goes_there_and_back() -> None:
    tensor = torch.ones(5, device="cuda")
    staging = Staging([tensor])
    copy = staging.host(tensor)
    assert copy.is_pinned()
    copy.mul_(3)
    staging.back()
    assert tensor.tolist() == [3] * 5
