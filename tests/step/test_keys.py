"""Calls of the key-value store with one key and with several; tests/mpi/step has its sums on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from unisono.errors import UsageError
from unisono.step.store import pair_keys

ONE, OTHER = torch.zeros(1), torch.zeros(2)


@pytest.mark.parametrize(
    ("keys", "tensors", "pairs"),
    [
        (3, ONE, [(3, ONE)]),
        ([3], [ONE], [(3, ONE)]),
        (range(2), (ONE, OTHER), [(0, ONE), (1, OTHER)]),
        ([], [], []),
    ],
)
def test_each_key_has_a_tensor(keys: Any, tensors: Any, pairs: list[tuple[int, torch.Tensor]]) -> None:
    found = pair_keys(keys, tensors)
    assert [key for key, _ in found] == [key for key, _ in pairs]
    assert all(one is other for (_, one), (_, other) in zip(found, pairs, strict=True))


@pytest.mark.parametrize(
    ("keys", "tensors", "words"),
    [
        ([0, 1], [ONE], r"2 keys \[0, 1\] have 1 tensors: give one for each key"),
        ([0], ONE, r"keys are \[0\] and tensors a Tensor: give one key and one tensor, or a list of each"),
        (0, [ONE], "keys are 0 and tensors a list: "),
    ],
)
def test_keys_without_a_tensor_are_refused(keys: Any, tensors: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        pair_keys(keys, tensors)
