"""Feed: the batches of a run, from a training set and a test set, in memory on every rank or from packs.

order of an epoch (`order.py`) ── share of this rank, step by step ──▶ reader ──▶ batches
                                                                        a data set in memory: rows of tensors
                                                                        a pack: decoded ahead (`loading.py`)
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import groupby

from unisono.data.loading import Batch, InputFacts, Reader
from unisono.data.order import Numbers, ShuffleOptions, own_numbers, share, steps_of
from unisono.engine import Observe, observed


def is_same_data(one: str, other: str) -> bool:
    """Return True if two fingerprints are of the same data; that of a pack of an older release lacks its last word.

    >>> is_same_data("40 13c62b16, 12 2f471622", "40 13c62b16 00c0ffee, 12 2f471622 0badcafe")
    True
    """
    parts, others = one.split(", "), other.split(", ")
    pairs = [sorted(pair) for pair in zip(parts, others, strict=False)]
    return len(parts) == len(others) and all(a == b or b.startswith(f"{a} ") for a, b in pairs)


@dataclass
class FeedFacts(InputFacts):
    """Facts of a run's data: all that a rank without batches, a server's, knows."""

    samples: int
    """Number of training samples, on all ranks together."""
    test_samples: int
    """Number of test samples, on all ranks together."""
    fingerprint: str
    """Fingerprint of the data, with which a resumed run checks that they are the same."""
    labels_per_sample: int = 1
    """Labels of a sample: 1, its class, or the tokens of a window of text, which are its channels."""
    notes: tuple[str, ...] = ()
    """Lines on what was chosen, for the start of a run."""

    def close(self) -> None:
        """Do nothing."""


class Feed(FeedFacts):
    """Batches for the ranks of a world. The order of an epoch depends on the seed and the shuffle, not on the ranks."""

    order: Numbers
    """Order of the samples in the epoch whose batches were asked for last."""

    def __init__(
        self,
        train: Reader,
        test: Reader,
        seed: int,
        fingerprint: str,
        *,
        shuffle: ShuffleOptions = ShuffleOptions(),  # noqa: B008  frozen
        own: int = 0,
        notes: tuple[str, ...] = (),
        observe: Observe | None = None,
    ) -> None:
        """Read batches from both sets. `own` is the number of samples that are this rank's own, if any are.

        `observe` is called with the span of each shuffle.
        """
        inputs, counts = (train.classes, train.channels, train.first), (train.samples, test.samples)
        self.facts = FeedFacts(*inputs, *counts, fingerprint, train.labels_per_sample, notes)
        """Facts alone, without batches."""
        super().__init__(**vars(self.facts))
        self._train, self._test, self._world, self._seed = train, test, train.sampler.world, seed
        self._shuffle, self._own, self._observe = shuffle, own, observe

    def share_among(self, virtual: int) -> None:
        """Give each rank the samples of its shares of so many virtual ranks (`reducer/virtual_ranks.py`)."""
        self._train.sampler.virtual = virtual

    def epoch(self, epoch: int, batch: int, done: int) -> Generator[Batch]:
        """Return this rank's share of an epoch from step `done` on. Collective; one epoch at a time."""
        with observed(self._observe, "shuffle", "shuffle"):
            order = self.order = self._train.sampler.order(self._seed, epoch, batch, self._shuffle)
            self._train.sampler.epoch(order, batch, done)
        seat = self._world.rank, self._world.size, self._train.sampler.virtual
        steps = range(done, steps_of(self.samples, batch))
        wanted = (share(order, batch, step, *seat) for step in steps)
        return self._train.batches(wanted, self._seed, epoch)

    def test_batches(self, batch: int, alone: bool = False) -> Iterator[Batch]:
        """Return this rank's share of the test set, in batches of at most ceil(batch / ranks) samples.

        If `alone`, return all of it on this rank, in batches of at most `batch`. Not collective.
        """
        return self._test.in_turn(batch, alone)

    def own_batches(self, batch: int, step: int) -> Iterator[Batch]:
        """Return batches of `batch` samples of this rank's own, without end, from its step `step` on. Not collective.

        The rank visits all samples that it holds in an order of its own, then again in another.
        """
        assert self._own, "the feed is that of ranks out of step"

        def draw(epoch: int, done: int) -> Numbers:
            return self._train.sampler.own_epoch(self._seed, epoch, batch, done)

        found = own_numbers(draw, self._own, batch, step)
        for epoch, several in groupby(found, key=lambda pair: pair[0]):
            yield from self._train.batches((numbers for _, numbers in several), self._seed, epoch)

    def stop_threads(self) -> None:
        """Stop the threads: all that a rank does by itself if the others cannot be waited for."""
        self._train.stop()
        self._test.stop()

    def close(self) -> None:
        """Stop the threads and free the memory. Collective."""
        self.stop_threads()
        self._train.close()
        self._test.close()
