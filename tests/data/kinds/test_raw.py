"""Raw images are packed, measured and transformed as they are."""

from __future__ import annotations

import numpy as np
import pytest

from unisono.data.kinds.raw import RawKind
from unisono.data.pack.options import PackOptions


def test_raw_samples_stay_as_they_are() -> None:
    assert RawKind().encode(b"\0\1\2", PackOptions(short_side=1)) == b"\0\1\2"


@pytest.mark.parametrize(("shape", "channels"), [((2, 6), 1), ((2, 6, 1), 1), ((2, 2, 3), 3)])
def test_pixels_have_the_shape_of_the_pack(shape: tuple[int, ...], channels: int) -> None:
    sample = np.arange(12, dtype=np.uint8)
    found = RawKind().pixels(sample, shape)
    assert found is not None
    assert found.shape == (*shape[:2], channels)
    assert found.ravel().tolist() == list(range(12))
