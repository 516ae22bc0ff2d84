"""Staging, on tensors that are not the host's: here those of the meta device stand in for a GPU's where they can."""

from __future__ import annotations

import pytest
import torch

from unisono.torch_backend.devices import Staging, on_any_device


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
    staging, tensor = Staging(), torch.empty(3, device="meta")
    staging._pairs[id(tensor)] = tensor, torch.ones(3)
    first, (second,) = staging.host(tensor), staging.host([tensor])
    assert first is second
    assert staging.device([first])[0] is tensor
    assert staging.host(torch.zeros(1)).device.type == "cpu"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_s_tensor_goes_there_and_back() -> None:
    staging, tensor = Staging(), torch.ones(5, device="cuda")
    copy = staging.host(tensor)
    assert copy.is_pinned()
    copy.mul_(3)
    staging.back()
    assert tensor.tolist() == [3] * 5
