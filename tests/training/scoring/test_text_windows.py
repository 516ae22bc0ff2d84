from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.training.scoring.text_windows import NO_LABEL, context_after, cut_windows

END = 0
texts = st.lists(st.integers(1, 9), min_size=1, max_size=20)


def test_the_worked_example() -> None:
    inputs, labels = cut_windows(torch.tensor([1, 2, 3, 4, 5]), END, 3)
    assert inputs.tolist() == [[END, 1, 2], [3, 4, END]]
    assert labels.tolist() == [[1, 2, 3], [4, 5, NO_LABEL]]
    context, last = context_after(torch.tensor([1, 2, 3, 4, 5]), END, 3)
    assert (context.tolist(), last) == ([[3, 4, 5]], 2)


@given(texts, st.integers(1, 8))
def test_each_token_is_a_label_once_after_the_one_before_it(text: list[int], window: int) -> None:
    inputs, labels = cut_windows(torch.tensor(text), END, window)
    assert inputs.shape == labels.shape == (len(inputs), window)
    pairs = [
        (before, label)
        for before, label in zip(inputs.flatten().tolist(), labels.flatten().tolist(), strict=True)
        if label != NO_LABEL
    ]
    assert pairs == list(zip([END, *text], text, strict=False))
    assert len(inputs) == len(range(0, len(text), window)), "no window without a label"


@given(texts, st.integers(1, 8))
def test_the_context_ends_with_the_last_token(text: list[int], window: int) -> None:
    context, last = context_after(torch.tensor(text), END, window)
    known = [END, *text][-window:]
    assert context.shape == (1, window)
    assert context[0, : last + 1].tolist() == known
    assert context[0, last + 1 :].tolist() == [END] * (window - len(known))
