"""Facts of a feed for a rank that gets no batches: a server's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from unisono.data.feed import Feed
from unisono.data.loading import Batch
from unisono.errors import UsageError


@dataclass
class BlankFeed:
    """Feed without samples. It knows what another rank's feed told it."""

    samples: int
    test_samples: int
    classes: int
    channels: int
    fingerprint: str
    first: torch.Tensor
    """Zeros with the shape and memory layout of a batch of one sample."""
    labels_per_sample: int = 1
    notes: tuple[str, ...] = ()

    def epoch(self, epoch: int, batch: int, done: int) -> Iterator[Batch]:
        """Raise UsageError: a server has no batches."""
        raise UsageError(f"a server has no batches (epoch {epoch}, batch {batch}, step {done})")

    def test_batches(self, batch: int) -> Iterator[Batch]:
        """Raise UsageError: a server has no batches."""
        raise UsageError(f"a server has no batches (test, batch {batch})")

    def own_batches(self, batch: int, step: int) -> Iterator[Batch]:
        """Raise UsageError: a server has no batches."""
        raise UsageError(f"a server has no batches (batch {batch}, step {step})")

    def all_test_batches(self, batch: int) -> Iterator[Batch]:
        """Raise UsageError: a server has no batches."""
        raise UsageError(f"a server has no batches (test, batch {batch})")

    def blank(self, samples: int) -> torch.Tensor:
        """Return zeros with the shape and memory layout of the inputs of a batch."""
        shape = (samples, *self.first.shape[1:])
        last = self.first.dim() == 4 and self.first.is_contiguous(memory_format=torch.channels_last)
        return torch.zeros(shape, dtype=self.first.dtype).contiguous(
            memory_format=torch.channels_last if last else torch.contiguous_format
        )

    def close(self) -> None:
        """Do nothing."""


def facts_of(feed: Feed) -> BlankFeed:
    """Return the facts of a feed."""
    sizes = feed.samples, feed.test_samples, feed.classes, feed.channels
    return BlankFeed(*sizes, feed.fingerprint, feed.blank(1), feed.labels_per_sample)
