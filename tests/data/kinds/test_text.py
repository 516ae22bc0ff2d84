"""Windows are packed as they are, and their labels are tokens."""

from __future__ import annotations

import torch

from unisono.data.kinds.text import TextKind
from unisono.data.pack.options import PackOptions
from unisono.data.text.tokenizers import ByteTokenizer


def test_windows_stay_as_they_are() -> None:
    assert TextKind().encode(b"\0\1\2\3", PackOptions()) == b"\0\1\2\3"


def test_labels_are_those_of_the_window_not_of_the_index() -> None:
    memory = torch.arange(12).reshape(2, 2, 3)
    assert TextKind().labels(memory, torch.zeros(2)).tolist() == [[3, 4, 5], [9, 10, 11]]
    assert TextKind().labels_per_sample((4,)) == 3


def test_only_bytes_stand_for_one_byte_each() -> None:
    assert TextKind().bytes_per_label(ByteTokenizer.tokens) == 1
    assert TextKind().bytes_per_label(("the", "a")) is None
    assert TextKind.labels_are_tokens
