"""What a convolution computes, as a value."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.compute.geometry import Geometry, Pass, image, padded, rows


@given(data=st.data())
def test_places_are_those_of_pytorch(layers: Any, data: st.DataObject) -> None:
    geometry = data.draw(layers.geometries())
    assert layers.expected(geometry, layers.tensors(geometry, 0))[Pass.FORWARD].shape[2:] == geometry.places


def test_operations_and_bytes() -> None:
    one = Geometry(2, 64, 128, (56, 56), (3, 3), (2, 2), (1, 1), (1, 1), 2, torch.float32)
    assert one.operations == 2 * 2 * 28 * 28 * 128 * 32 * 9
    assert one.least_bytes == 4 * (2 * 64 * 56 * 56 + 2 * 128 * 28 * 28 + 128 * 32 * 9)


def test_names_tell_layers_apart() -> None:
    one = Geometry(2, 64, 128, (56, 56), (3, 3), (2, 2), (1, 1), (1, 1), 2, torch.float32)
    assert one.name == "2x64x56x56-128-kernel3x3-stride2x2-padding1x1-dilation1x1-groups2-float32"


def test_rows_and_pictures() -> None:
    picture = torch.arange(24.0).reshape(1, 2, 3, 4)
    assert rows(picture).is_contiguous()
    assert rows(picture)[0, 1, 2].tolist() == picture[0, :, 1, 2].tolist()
    assert torch.equal(image(rows(picture)), picture)
    last = picture.contiguous(memory_format=torch.channels_last)
    assert rows(last).data_ptr() == last.data_ptr()


def test_zeros_around() -> None:
    inputs = torch.ones(1, 2, 2, 1)
    found = padded(inputs, (1, 0), (5, 3))
    assert found[0, :, :, 0].tolist() == [[0, 0, 0], [1, 1, 0], [1, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert padded(inputs, (0, 0), (2, 1)) is inputs
