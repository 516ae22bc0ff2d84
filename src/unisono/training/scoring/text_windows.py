"""Windows of one text, in which each of its tokens is a label once, and the context of the token after it.

    text        a b c d e                      window = 3
    stream      . a b c d e                    . ends a text: in training it stands before the next one, too
    inputs      . a b     c d .                the last window is filled up with it
    labels      a b c     d e -                - is no label
    context         c d e                      the last tokens, whose next one is predicted

Windows are cut as in a pack: a token sees those before it in its window, never those of the window before.
"""

from __future__ import annotations

import torch

NO_LABEL = -100
"""Label of places after a text, which PyTorch's cross entropy leaves out."""


def cut_windows(text: torch.Tensor, end_of_text: int, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and the labels of a text of tokens, int64, (tokens,): both (windows, window)."""
    count = -(-len(text) // window)
    inputs = torch.full((count * window,), end_of_text)
    labels = torch.full((count * window,), NO_LABEL)
    inputs[1 : len(text)] = text[:-1]
    labels[: len(text)] = text
    return inputs.view(count, window), labels.view(count, window)


def context_after(text: torch.Tensor, end_of_text: int, window: int) -> tuple[torch.Tensor, int]:
    """Return the window before the token that follows a text, (1, window), and the place of its last token."""
    known = torch.cat([torch.tensor([end_of_text]), text])[-window:]
    inputs = torch.full((1, window), end_of_text)
    inputs[0, : len(known)] = known
    return inputs, len(known) - 1
