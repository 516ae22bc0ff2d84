"""Order and random numbers of samples: pure functions of (seed, epoch, ...), the same for any number of ranks.

10 samples, batches of 4, 2 ranks:

    epoch's permutation   7 2 9 4 | 0 5 1 8 | 3 6
    step                     0         1       2
    rank 0                 7 2       0 5      3
    rank 1                 9 4       1 8      6

`docs/data.md` has the interval and the scope of the shuffle. Between two shuffles each part of a batch keeps its
samples, and sees them in the order of the epoch's own permutation. The next epoch of the one above, with
"every:2,parts:2":

    own permutation        5 0 6 1 7 2 4 3 8 9
    of part 0, part 1      5 0 7 2 3            6 1 4 8 9
    epoch's order          5 0 6 1 | 7 2 4 8 | 3 9
    rank 0, rank 1         5 0       7 2       3            6 1       4 8       9

A rank keeps its samples if it has whole parts of a batch, as it has where the ranks divide the parts.

Random numbers of a sample, for its changes in training, are counter-based: SplitMix64 (Steele, Lea and Flood 2014),
whose counter begins at a hash of seed, epoch and sample; 53 bits of each output make a number in [0, 1).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from unisono.errors import RecipeError
from unisono.placement import Placement

if TYPE_CHECKING:
    from unisono.world import World

Numbers = NDArray[np.int64]
"""Numbers of samples."""

FORM = re.compile(r"(?P<interval>epoch|once|every:(?P<every>[1-9]\d{0,8}))(,parts:(?P<parts>[1-9]\d{0,8}))?", re.ASCII)


@dataclass(frozen=True)
class ShuffleOptions:
    """Interval and scope of the shuffle."""

    every: int = 1
    """Epochs from one shuffle between all ranks to the next; 0: only the first epoch has one."""
    parts: int = 0
    """Equal parts of each batch in which samples stay in between; 0: as many as the batch has samples."""

    def __str__(self) -> str:
        interval = {0: "once", 1: "epoch"}.get(self.every, f"every:{self.every}")
        return f"{interval},parts:{self.parts}" if self.parts else interval

    def first_epoch(self, epoch: int) -> int:
        """Return the epoch of the last shuffle between all ranks, up to `epoch`.

        >>> [ShuffleOptions(every=3).first_epoch(epoch) for epoch in range(7)]
        [0, 0, 0, 3, 3, 3, 6]
        """
        return epoch - epoch % self.every if self.every else 0


def parse_shuffle(text: str) -> ShuffleOptions:
    """Return the options that a recipe's `data.shuffle` names. Raises RecipeError for other words.

    >>> parse_shuffle("every:4,parts:2")
    ShuffleOptions(every=4, parts=2)
    """
    match = FORM.fullmatch(text)
    every = 0 if match is None or match["interval"] == "once" else int(match["every"] or 1)
    if match is None or (every == 1 and match["parts"]):
        raise RecipeError(
            f'data.shuffle = "{text}"; it is "epoch", "every:N" or "once", the last two perhaps with ",parts:P", as in '
            '"every:4,parts:2"'
        )
    return ShuffleOptions(every, int(match["parts"] or 0))


def scope_note(shuffle: ShuffleOptions, placement: Placement) -> str:
    """Return a line about samples that leave their part's ranks or cross supernodes in each epoch; empty if none do.

    Part q of P belongs to ranks q p / P to (q + 1) p / P - 1.
    """
    ranks, parts = placement.ranks, shuffle.parts
    if not parts or parts % ranks == 0:
        return ""
    if ranks % parts:
        return f"{ranks} ranks do not divide into {parts} parts, so samples between two parts move in each epoch"
    members = ranks // parts
    for first in range(0, ranks, members):
        sites = {placement.supernode_of(rank) for rank in range(first, first + members)}
        if len(sites) > 1:
            return (
                f"ranks {first} to {first + members - 1} share a part, but are in {len(sites)} supernodes, so samples "
                "cross uplinks in each epoch: number ranks supernode by supernode, or set more parts"
            )
    return ""


def joined_ranges(begins: Numbers, sizes: Numbers) -> Numbers:
    """Return ranges one after the other: of sizes[i] numbers, from begins[i] on.

    >>> joined_ranges(np.array([3, 0]), np.array([3, 2])).tolist()
    [3, 4, 5, 0, 1]
    """
    numbers: Numbers = (begins - sizes.cumsum() + sizes).repeat(sizes)
    numbers += np.arange(len(numbers))
    return numbers


def permutation(samples: int, seed: int, epoch: int) -> Numbers:
    """Return the order in which an epoch visits the samples: a permutation, int64, shape (samples,)."""
    return epoch_rng(seed, epoch).permutation(samples)


def epoch_rng(seed: int, epoch: int, worker: int = -1) -> np.random.Generator:
    """Return the random numbers of the order of an epoch: of all ranks, or of one worker that draws by itself."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, (worker + 1) << 40 | epoch], np.uint64)))


def epoch_order(samples: int, batch: int, seed: int, epoch: int, shuffle: ShuffleOptions) -> Numbers:
    """Return the order in which an epoch with this shuffle visits the samples: a permutation, int64, shape (samples,).

    `batch` is the number of samples of a step over all ranks.
    """
    permuted, first = permutation(samples, seed, epoch), shuffle.first_epoch(epoch)
    if epoch == first:
        return permuted
    at_position = ranks_of(samples, batch, min(shuffle.parts or batch, batch))
    of_sample = np.empty_like(at_position)
    of_sample[permutation(samples, seed, first)] = at_position
    order = np.empty_like(permuted)
    order[np.argsort(at_position, kind="stable")] = permuted[np.argsort(of_sample[permuted], kind="stable")]
    return order


def worker_order(numbers: Numbers, seed: int, worker: int, epoch: int) -> Numbers:
    """Return the order in which one worker visits the samples `numbers` in an epoch of its own, int64."""
    return epoch_rng(seed, epoch, worker).permutation(numbers)


def own_numbers(
    draw: Callable[[int, int], Numbers], samples: int, batch: int, step: int
) -> Iterator[tuple[int, Numbers]]:
    """Yield, for each step of a worker from `step` on, its epoch and the samples of its batch, without end.

    An epoch of a worker ends when it has seen all its `samples` once; its last batch may be short. `draw(epoch, done)`
    returns the order of an epoch, which begins at its step `done`.
    """
    steps = steps_of(samples, batch)
    while True:
        epoch, done = divmod(step, steps)
        order = draw(epoch, done)
        for place in range(done, steps):
            yield epoch, order[place * batch : (place + 1) * batch]
        step = (epoch + 1) * steps


def random_draw(numbers: Numbers, seed: int, worker: int, draw: int, samples: int) -> Numbers:
    """Return a worker's draw of so many of the samples `numbers`: none twice, independent of its other draws; int64."""
    return epoch_rng(seed, draw, worker).choice(numbers, samples, replace=False)


def steps_of(samples: int, batch: int) -> int:
    """Return the number of steps of an epoch; the last step may be short."""
    return -(-samples // batch)


def share(order: Numbers, batch: int, step: int, rank: int, ranks: int, virtual: int = 0) -> Numbers:
    """Return the samples of one rank in one step of an epoch with this order: its part of the global batch, or the
    parts of its `virtual` ranks, of which it has those from virtual * rank // ranks on."""
    global_batch, virtual = order[step * batch : (step + 1) * batch], virtual or ranks
    start, stop = (len(global_batch) * (virtual * edge // ranks) // virtual for edge in (rank, rank + 1))
    return global_batch[start:stop]


def ranks_of(samples: int, batch: int, ranks: int, virtual: int = 0) -> NDArray[np.int32]:
    """Return the rank that sees the sample at each position of an epoch's order, int32: the inverse of `share`."""
    if virtual:
        return ranks_of(virtual, virtual, ranks)[ranks_of(samples, batch, virtual)]
    steps, rest = divmod(samples, batch)
    full, last = (
        ((np.arange(1, length + 1) * ranks - 1) // max(1, length)).astype(np.int32) for length in (batch, rest)
    )
    return np.concatenate([np.tile(full, steps), last])


class Sampler:
    """Order in which the ranks of a world visit samples. Here each rank can read all, so that none ever moves."""

    order_name = ""
    """Property that orders depend on, beside the arguments of `order`; empty if they are full permutations."""
    virtual = 0
    """Number of virtual ranks that share each batch; 0: the ranks do."""
    note = ""
    """Line for the start of a run; empty if there is nothing to say."""

    def __init__(self, samples: int, world: World) -> None:
        """Keep the number of samples, over all ranks of `world`, which share each batch."""
        self._count, self.world = samples, world
        self._own: Numbers | None = None

    @property
    def numbers(self) -> NDArray[np.integer]:
        """Numbers of the samples that this rank can read, ascending."""
        return np.arange(self._count)

    def order(self, seed: int, epoch: int, batch: int, shuffle: ShuffleOptions) -> Numbers:
        """Return the order of an epoch in steps of `batch` samples: each once, the same on any number of ranks."""
        return epoch_order(self._count, batch, seed, epoch, shuffle)

    def epoch(self, order: Numbers, batch: int, done: int = 0) -> None:
        """Give each rank what it will see of `order` in steps of `batch` samples (`order.share`). Collective.

        The first `done` steps are left out: a run is resumed.
        """

    def stop(self) -> None:
        """Stop its threads: all that a rank does by itself if the others cannot be waited for."""

    def give_stretches(self) -> None:
        """Give each rank a stretch of the samples, which it will see in turn. Collective."""

    def own(self, order: Numbers) -> Numbers:
        """Return the numbers of the samples that are this rank's own, ascending; no epoch follows. Collective.

        All ranks together own every sample of `order`, a permutation of all.
        """
        return np.arange(len(order))

    def own_epoch(self, seed: int, epoch: int, batch: int, done: int) -> Numbers:  # noqa: ARG002  in memory
        """Return the order of this rank's own samples in an epoch of its own, which it begins at step `done`."""
        held = np.arange(self._count) if self._own is None else self._own
        return worker_order(held, seed, self.world.rank, epoch)


DRAWS_PER_SAMPLE = 24
"""Largest count of numbers for a sample: an image tries ten crops with two each, then draws position and mirroring."""

INCREMENT, FIRST_FACTOR, SECOND_FACTOR = (
    np.uint64(word) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
"""Increment of the counter, and the factors that mix it."""


def uniform_numbers(seed: int, epoch: int, samples: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """Return `count` random numbers in [0, 1) for each sample: float64, shape (samples, count)."""
    words = np.array([seed & 0xFFFFFFFFFFFFFFFF, epoch], np.uint64)
    key = _mixed(_mixed(words[:1]) + words[1:] * INCREMENT)
    begins = _mixed(key + samples.astype(np.uint64) * INCREMENT)
    counters = begins[:, None] + np.arange(1, count + 1, dtype=np.uint64) * INCREMENT
    return (_mixed(counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


class CounterRNG:
    """Random number generator of one sample: each call of `random()` returns the next of its numbers."""

    def __init__(self, numbers: Iterable[float]) -> None:
        self.random: Callable[[], float] = iter(numbers).__next__


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    numbers = (numbers ^ (numbers >> np.uint64(30))) * FIRST_FACTOR
    numbers = (numbers ^ (numbers >> np.uint64(27))) * SECOND_FACTOR
    mixed: NDArray[np.uint64] = numbers ^ (numbers >> np.uint64(31))
    return mixed
