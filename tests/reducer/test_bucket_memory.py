"""Memory of gradients in buckets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from unisono.plan.bucket_layout import plan_memory
from unisono.reducer.bucket_memory import BucketMemory, lies_in
from unisono.step.layout import Bucket

WHOLE = 1 << 20


class Allocator:
    """World with the one method that a BucketMemory uses."""

    def empty(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(length, dtype=dtype)


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype))


def lay_out(*parameters: nn.Parameter, largest: int = WHOLE) -> BucketMemory:
    memory = BucketMemory(parameters, Allocator())
    memory.lay_out(list(reversed(range(len(parameters)))), largest)
    return memory


def pack(memory: BucketMemory, *gradients: torch.Tensor | None, weight: float = 1.0) -> None:
    for key in memory.keys:
        memory.pack(key, dict(enumerate(gradients)), weight)


def presence(memory: BucketMemory) -> dict[int, bool]:
    """Return for which gradients any rank had one."""
    return {index: there for key in memory.keys for index, there in memory.present(key).items()}


def test_gradients_are_packed_times_their_weight() -> None:
    memory = lay_out(parameter(2), parameter(3))
    pack(memory, torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0]), weight=0.5)
    line, flags = [1.5, 2.0, 2.5] + [0.0] * 13, [1.0, 1.0] + [0.0] * 14
    assert memory.bucket(1).tolist() == [*line, 0.5, 1.0, *[0.0] * 14, *flags]
    assert [view.tolist() for view in memory.views] == [[0.5, 1.0], [1.5, 2.0, 2.5]]
    assert memory.present(1) == {0: True, 1: True}


def test_a_view_has_the_shape_and_strides_of_its_parameter() -> None:
    last = nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    turned = nn.Parameter(torch.zeros(3, 4).t())
    spread = nn.Parameter(torch.zeros(3, 1).expand(3, 4))
    every_other = nn.Parameter(torch.zeros(6, 8)[::2, ::2])
    parameters = [parameter(), parameter(7), parameter(2, 3), parameter(0, 3), last, turned, spread, every_other]
    memory = lay_out(*parameters)
    for tensor, view in zip(parameters, memory.views, strict=True):
        assert view.shape == tensor.shape
        assert view.dtype is tensor.dtype
    for tensor, view in zip(parameters[:6], memory.views, strict=False):
        assert view.stride() == tensor.stride()
    assert [view.stride() for view in memory.views[6:]] == [(4, 1), (4, 1)]


def test_views_match_the_layout() -> None:
    memory = lay_out(parameter(2, 3), parameter(4), parameter(5, dtype=torch.float64))
    for index, view in enumerate(memory.views):
        view.fill_(index + 1)
    for key in memory.keys:
        for index in memory.place(key).parameters:
            start = memory.starts[index] - memory.place(key).start
            assert (memory.bucket(key)[start : start + memory.views[index].numel()] == index + 1).all()


def test_gradients_with_other_strides_than_the_parameter() -> None:
    values = torch.arange(24.0).reshape(2, 3, 2, 2)
    last = values.to(memory_format=torch.channels_last)
    plain, mixed = parameter(2, 3, 2, 2), nn.Parameter(last.clone(memory_format=torch.preserve_format))
    memory = lay_out(plain, mixed, plain, parameter(2, 3), parameter(2, 3))
    wide = torch.arange(12.0).reshape(2, 6)[:, ::2]
    pack(memory, last, values, values.flip(0).flip(0), wide, torch.ones(()).expand(2, 3), weight=2.0)
    for view, expected in zip(memory.views, (values, values, values, wide, torch.ones(2, 3)), strict=True):
        assert torch.equal(view, 2 * expected)
    assert memory.views[1].is_contiguous(memory_format=torch.channels_last)


def test_gradients_within_a_larger_tensor() -> None:
    memory = lay_out(parameter(2, 3))
    pack(memory, torch.arange(20.0)[5:11].view(2, 3))
    assert memory.views[0].tolist() == [[5, 6, 7], [8, 9, 10]]


@pytest.mark.parametrize("largest", [WHOLE, 64])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_gradients_are_sent_as_pairs(largest: int, dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.zeros(5, 4, dtype=dtype).t())
    memory = lay_out(weight, parameter(2), largest=largest)
    gradient = torch.randn(4, 5, dtype=dtype)
    pack(memory, gradient, torch.ones(2), weight=3.0)
    assert memory.views[0].stride() == weight.stride()
    assert torch.equal(memory.views[0], gradient * 3)
    pack(memory, gradient.conj(), torch.ones(2))
    assert torch.equal(memory.views[0], gradient.conj())


def test_a_gradient_already_in_its_bucket() -> None:
    memory = lay_out(parameter(40), largest=64)
    memory.views[0].copy_(torch.arange(40.0))
    pack(memory, memory.views[0])
    assert torch.equal(memory.views[0], torch.arange(40.0))
    pack(memory, memory.views[0], weight=0.5)
    assert torch.equal(memory.views[0], torch.arange(40.0) / 2)


def test_a_missing_gradient_is_zero_with_its_flag_unset() -> None:
    memory = lay_out(parameter(2), parameter(3), parameter(20), largest=64)
    for view in memory.views:
        view.fill_(float("nan"))
    pack(memory, torch.ones(2), None, None)
    assert [view.sum().item() for view in memory.views] == [2, 0, 0]
    assert presence(memory) == {2: False, 1: False, 0: True}
    pack(memory, None, torch.ones(3), torch.zeros(20), weight=0.0)
    assert presence(memory) == {2: True, 1: True, 0: False}


def test_a_flag_set_on_any_rank_counts() -> None:
    """What travels is summed, flags as well."""
    memory = lay_out(parameter(2), parameter(3))
    pack(memory, None, torch.ones(3))
    mine = memory.bucket(1).clone()
    pack(memory, None, torch.ones(3))
    memory.bucket(1).add_(mine)
    assert memory.present(1) == {1: True, 0: False}
    assert memory.views[1].tolist() == [2, 2, 2]


def test_a_split_parameter_is_packed_part_by_part() -> None:
    memory = lay_out(parameter(8, 5), largest=64)
    gradient = torch.arange(40.0).reshape(8, 5)
    assert list(memory.keys) == [1, 2, 3]
    memory.pack(2, {0: gradient}, 1.0)
    assert memory.views[0].flatten().tolist() == [0.0] * 16 + [float(i) for i in range(16, 32)] + [0.0] * 8
    memory.pack(3, {0: gradient}, 1.0)
    assert memory.present(3) == {0: True}
    memory.pack(1, {0: gradient}, 1.0)
    assert torch.equal(memory.views[0], gradient)
    assert memory.present(1) == memory.present(2) == {}


def test_another_layout_begins_with_zeros_and_fits() -> None:
    memory = lay_out(parameter(40), parameter(3), largest=64)
    pack(memory, torch.ones(40), torch.ones(3))
    before, planned = memory.buckets, memory.plan([0, 1], WHOLE)
    memory.lay_out([0, 1], WHOLE)
    assert memory.buckets != before
    assert all(not memory.bucket(key).any() for key in memory.keys)
    buckets = plan_memory([(40, torch.float32), (3, torch.float32)], [0, 1], WHOLE).buckets
    assert list(memory.buckets) == planned == [Bucket(bucket.nbytes, bucket.parameters) for bucket in buckets]


def test_an_average_moves_with_its_place_when_buckets_change() -> None:
    memory = lay_out(parameter(40), parameter(3), largest=64)
    pack(memory, torch.ones(40), torch.ones(3))
    memory.parameters[0].grad = before = memory.views[0]
    memory.lay_out([0, 1], WHOLE)
    assert memory.parameters[0].grad.tolist() == [1.0] * 40
    assert memory.views[0].data_ptr() != before.data_ptr()
    assert lies_in(memory.parameters[0].grad, memory.views[0]), "it is no gradient of this rank alone"


def test_gradients_of_lower_precision_keep_it() -> None:
    memory = lay_out(parameter(3, dtype=torch.bfloat16), parameter(3))
    gradient = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)
    pack(memory, gradient, gradient.float(), weight=0.25)
    assert memory.views[0].dtype is torch.bfloat16
    assert torch.equal(memory.views[0], gradient / 4)
    assert torch.equal(memory.views[1], gradient.float() / 4)


SHAPES = st.lists(st.lists(st.integers(0, 6), max_size=4), min_size=1, max_size=5)


@given(SHAPES, st.integers(1, 600), st.sampled_from([1.0, 0.5]), st.data())
def test_all_gradients_are_packed_with_any_strides_and_nothing_else(
    shapes: list[list[int]], largest: int, weight: float, data: st.DataObject
) -> None:
    def turned(shape: list[int]) -> torch.Tensor:
        """A dense tensor of that shape whose dimensions lie in any order."""
        order = data.draw(st.permutations(range(len(shape))))
        values = torch.rand([shape[place] for place in order]) + 1
        return values.permute([order.index(place) for place in range(len(shape))])

    parameters = [nn.Parameter(turned(shape)) for shape in shapes]
    memory = BucketMemory(parameters, Allocator())
    memory.lay_out(data.draw(st.permutations(range(len(shapes)))), largest)
    gradients = [data.draw(st.sampled_from([None, turned(shape)])) for shape in shapes]
    pack(memory, *gradients, weight=weight)
    for tensor, view, gradient in zip(parameters, memory.views, gradients, strict=True):
        assert view.stride() == tensor.stride() or not tensor.numel()
        assert torch.equal(view, torch.zeros_like(tensor) if gradient is None else weight * gradient)
    travels = sum(memory.bucket(key).sum(dtype=torch.float64).item() for key in memory.keys)
    there = [gradient for gradient in gradients if gradient is not None]
    own = sum(weight * gradient.sum(dtype=torch.float64).item() for gradient in there)
    assert travels == pytest.approx(own + len(there))
    assert presence(memory) == {index: gradient is not None for index, gradient in enumerate(gradients)}


@pytest.mark.parametrize("largest", [WHOLE, 256])
def test_weights_are_sent_and_returned_as_their_mean(largest: int) -> None:
    last = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    turned, every_other = nn.Parameter(torch.randn(3, 40).t()), nn.Parameter(torch.randn(6, 8)[::2, ::2])
    conjugate = nn.Parameter(torch.randn(5, dtype=torch.complex64).conj())
    parameters = [nn.Parameter(torch.randn(7)), last, turned, every_other, conjugate]
    before = [tensor.detach().clone() for tensor in parameters]
    memory = lay_out(*parameters, largest=largest)
    for key in memory.keys:
        memory.pack_weights(key, 2)
        memory.bucket(key).mul_(4)  # the sum of two ranks, one of which has three times as much
    for key in reversed(memory.keys):
        memory.write_weights(key, memory.bucket(key))
    for tensor, old in zip(parameters, before, strict=True):
        torch.testing.assert_close(tensor.detach(), 2 * old)


def test_buckets_have_their_keys_by_the_order_in_which_they_are_sent() -> None:
    memory = BucketMemory([parameter(40), parameter(40), parameter(40)], Allocator())
    memory.lay_out([2, 1, 0], 192)
    buckets = memory.buckets
    memory.lay_out([2, 1, 0], 192, (2, 0, 1))
    assert memory.buckets == (buckets[2], buckets[0], buckets[1])
    assert memory.filled == (2, 3, 1)
    assert [memory.place(key).parameters for key in memory.keys] == [bucket.parameters for bucket in memory.buckets]
