"""A small checkpoint to write and read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from unisono.training.checkpoint.layout import Checkpoint


@pytest.fixture
def trained() -> Callable[..., Checkpoint]:
    """Makes the checkpoint of a step, with Adam's state."""

    def make(step: int, **progress: object) -> Checkpoint:
        torch.manual_seed(step)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
        return Checkpoint(step, model.state_dict(), optimizer.state_dict(), {"epoch": step, "loss": 0.1, **progress})

    return make
