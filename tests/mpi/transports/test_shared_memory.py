"""Memory that ranks share: where one rank may not make its file, all have memory of their own."""

from __future__ import annotations

import os

import pytest
import torch

from unisono.world import World


def test_a_rank_that_may_make_no_file(group: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: str) -> int:
        raise PermissionError("Operation not permitted")

    if group.rank == group.size - 1:
        monkeypatch.setattr(os, "memfd_create", refuse)
    tensor = group.empty(10_000, torch.float32)
    assert group._group.find_shared(tensor.data_ptr(), tensor.nbytes) is None
    assert group.allreduce(tensor + 1).eq(group.size).all()
