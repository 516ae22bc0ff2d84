"""Geometry of a convolution."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.compute.geometry import Geometry, Pass, padded, to_nchw, to_nhwc


@given(data=st.data())
def test_the_output_size_is_pytorchs(layers: Any, data: st.DataObject) -> None:
    geometry = data.draw(layers.geometries())
    assert layers.expected(geometry, layers.tensors(geometry, 0))[Pass.FORWARD].shape[2:] == geometry.output_size


def test_operations_and_bytes() -> None:
    geometry = Geometry(2, 64, 128, (56, 56), (3, 3), (2, 2), (1, 1), (1, 1), 2, torch.float32)
    assert geometry.operations == 2 * 2 * 28 * 28 * 128 * 32 * 9
    assert geometry.least_bytes == 4 * (2 * 64 * 56 * 56 + 2 * 128 * 28 * 28 + 128 * 32 * 9)


def test_a_name_holds_all_sizes() -> None:
    geometry = Geometry(2, 64, 128, (56, 56), (3, 3), (2, 2), (1, 1), (1, 1), 2, torch.float32)
    assert geometry.name == "2x64x56x56-128-kernel3x3-stride2x2-padding1x1-dilation1x1-groups2-float32"


def test_nhwc_and_nchw() -> None:
    images = torch.arange(24.0).reshape(1, 2, 3, 4)
    assert to_nhwc(images).is_contiguous()
    assert to_nhwc(images)[0, 1, 2].tolist() == images[0, :, 1, 2].tolist()
    assert torch.equal(to_nchw(to_nhwc(images)), images)
    last = images.contiguous(memory_format=torch.channels_last)
    assert to_nhwc(last).data_ptr() == last.data_ptr()


def test_padding() -> None:
    inputs = torch.ones(1, 2, 2, 1)
    result = padded(inputs, (1, 0), (5, 3))
    assert result[0, :, :, 0].tolist() == [[0, 0, 0], [1, 1, 0], [1, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert padded(inputs, (0, 0), (2, 1)) is inputs
