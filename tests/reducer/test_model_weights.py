"""Weights of a model outside of steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.reducer.test_bucket_memory import Allocator

from unisono.reducer.bucket_memory import BucketMemory
from unisono.reducer.buffers import Buffers
from unisono.reducer.weights import ModelWeights
from unisono.step.rule import RankState, Traits


class OtherRank:
    """World of two ranks, of which the other has all weights and buffers 2 higher."""

    size = 2

    def allreduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor + (tensor + 1)  # its half of the sum


class Weights:
    """Weights of a layer with batch statistics: a weight and a bias, each in its bucket."""

    def __init__(self, differs: bool = True, anchor: float | None = None) -> None:
        self.model, self.waits = torch.nn.BatchNorm1d(4), list[None]()
        self.memory = BucketMemory(list(self.model.parameters()), Allocator())  # type: ignore[arg-type]
        self.memory.lay_out((1, 0), 16)
        self._anchor = anchor
        programs: Any = SimpleNamespace(
            memory=self.memory,
            buffers=Buffers(self.model),
            collectives=OtherRank(),
            traits=Traits(RankState.WHOLE if not differs else RankState.OWN if anchor is None else RankState.ANCHORED),
            rule_memory=SimpleNamespace(write_anchor=self._write_anchor),
        )
        self.weights = ModelWeights(self.model, programs, lambda: self.waits.append(None))

    def _write_anchor(self) -> bool:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(self._anchor or 0.0)
        return True

    def now(self) -> dict[str, float]:
        """Return the first element of each tensor."""
        return {name: float(tensor.flatten()[0]) for name, tensor in self.model.state_dict().items()}


OWN = {"weight": 1.0, "bias": 0.0, "running_mean": 0.0, "running_var": 1.0, "num_batches_tracked": 0.0}


def test_flats_are_copies_as_buckets_hold_them() -> None:
    rank = Weights()
    flats = rank.weights.flats()
    assert [flat[:4].tolist() for flat in flats.values()] == [[0.0] * 4, [1.0] * 4]
    assert rank.waits == [None]
    flats[2].fill_(9.0)
    assert rank.now() == OWN


def test_ranks_with_equal_weights_have_nothing_to_average() -> None:
    rank = Weights(differs=False)
    with rank.weights.averaged():
        assert rank.now() == OWN
    assert rank.waits == [None]


def test_the_mean_of_all_ranks_is_there_within_the_block() -> None:
    rank = Weights()
    with pytest.raises(ValueError, match="evaluation"), rank.weights.averaged():
        assert rank.now() == {**{name: value + 1 for name, value in OWN.items()}, "num_batches_tracked": 0.0}
        raise ValueError("evaluation")
    assert rank.now() == OWN


def test_the_anchor_takes_the_place_of_the_mean_of_the_weights() -> None:
    rank = Weights(anchor=7.0)
    with rank.weights.averaged():
        assert rank.now() == {**OWN, "weight": 7.0, "bias": 7.0, "running_mean": 1.0, "running_var": 2.0}
    assert rank.now() == OWN


def test_a_centre_is_there_within_the_block() -> None:
    rank, other = Weights(), Weights()
    with torch.no_grad():
        for tensor in (*other.model.parameters(), *other.model.buffers()):
            tensor.fill_(5)
    buffers = Buffers(other.model)
    buffers.pack()
    with pytest.raises(ValueError, match="evaluation"), rank.weights.centre(other.weights.flats(), buffers.flat):
        assert rank.now() == {**dict.fromkeys(OWN, 5.0), "num_batches_tracked": 0.0}
        raise ValueError("evaluation")
    assert rank.now() == OWN
    with rank.weights.centre(other.weights.flats(), None, wait=False):
        assert rank.now() == {**OWN, "weight": 5.0, "bias": 5.0}
    assert rank.waits == [None]
