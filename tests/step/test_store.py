"""Keys of a store, one and several; tests/mpi/step has the store on real ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from unisono.errors import UsageError
from unisono.step.store import key_numbers, pair_keys

ONE, OTHER = torch.zeros(1), torch.zeros(2)


@pytest.mark.parametrize(
    ("keys", "tensors", "pairs"),
    [
        (3, ONE, [(3, ONE)]),
        ([3], [ONE], [(3, ONE)]),
        (range(2), (ONE, OTHER), [(0, ONE), (1, OTHER)]),
        (np.int64(3), ONE, [(3, ONE)]),
        (np.arange(2), (ONE, OTHER), [(0, ONE), (1, OTHER)]),
        ([], [], []),
    ],
)
def test_each_key_has_a_tensor(keys: Any, tensors: Any, pairs: list[tuple[int, torch.Tensor]]) -> None:
    paired = pair_keys(keys, tensors)
    assert [(type(key), key) for key, _ in paired] == [(int, key) for key, _ in pairs]
    assert all(tensor is expected for (_, tensor), (_, expected) in zip(paired, pairs, strict=True))


@pytest.mark.parametrize(
    ("keys", "tensors", "message"),
    [
        ([0, 1], [ONE], r"2 keys \[0, 1\] have 1 tensors: give one for each key"),
        ([0], ONE, r"keys are \[0\] and tensors a Tensor: give one integer and one tensor, or a list of each"),
        ("a", ONE, "keys are 'a' and tensors a Tensor: give one integer and one tensor"),
        (["a"], [ONE], "key 'a' is a str: keys are integers"),
        ([0, 1], [ONE, None], "key 1 has a NoneType in place of a tensor; for a weight without a gradient, push zeros"),
        (0, [ONE], "keys are 0 and tensors a list: "),
    ],
)
def test_keys_without_a_tensor_are_refused(keys: Any, tensors: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        pair_keys(keys, tensors)


@pytest.mark.parametrize("keys", [3, [3], (np.int64(3),), np.int64(3)])
def test_one_key_is_a_list_of_one(keys: Any) -> None:
    assert key_numbers(keys) == [3]
