from __future__ import annotations

import numpy as np
import pytest
import torch

from unisono.data.text.transform import TextTransform
from unisono.errors import DecodeError


@pytest.mark.parametrize(("vocabulary", "dtype"), [(256, "<u2"), (70_000, "<u4")])
def test_labels_are_the_inputs_one_token_on(vocabulary: int, dtype: str) -> None:
    window = np.array([vocabulary - 1, 0, 7, 3]).astype(dtype)
    transform, out = TextTransform(3, vocabulary), torch.zeros(2, 3, dtype=torch.int64)
    transform.into(out, memoryview(window.tobytes()), None)
    assert out.tolist() == [[vocabulary - 1, 0, 7], [0, 7, 3]]
    assert transform.batch(out[None]).tolist() == [[vocabulary - 1, 0, 7]]


def test_a_window_of_another_length_is_refused_with_both_lengths() -> None:
    with pytest.raises(DecodeError, match="a window of 4 tokens has 8 bytes, this one 6"):
        TextTransform(3, 256).into(torch.zeros(2, 3), memoryview(bytes(6)), None)
