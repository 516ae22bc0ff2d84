"""Partitioned storage: each rank holds a partition, all ranks (or each group) hold one copy; the three calls of DIMD.

read     a stretch each, from few stripes; in an elastic run first what was left in memory (`handing_over.py`)
epoch    shuffle, so that each rank holds what it will see; nothing is sent if each rank holds it already
samples  any of those, from memory

When a pack is read, each rank takes a stretch of it, so that it reads few stripes: as in an epoch of one step, in the
order of the pack. In an epoch a rank holds the samples that it will see in that epoch. They depend on the order alone
(`data/order.py`): 10 samples, batches of 4, 2 ranks

    read            rank 0: 0 1 2 3 4         rank 1: 5 6 7 8 9
    epoch's order   7 2 9 4 | 0 5 1 8 | 3 6
    held            rank 0: 7 2  0 5  3       rank 1: 9 4  1 8  6

So every rank knows the owners of all samples, and no rank ever needs a sample of another (`docs/data.md`). Each of
several groups of ranks may hold a copy. 8 ranks on 4 nodes of 2 supernodes, in 2 groups:

    rank                            0  1 | 2  3 | 4  5 | 6  7     2 ranks a node
    supernode                       0  0 | 1  1 | 0  0 | 1  1     nodes are connected by turns
    group                           0  0   1  1   0  0   1  1     by number of rank: 0 0 0 0 1 1 1 1

Ranks are taken supernode by supernode, node by node. Members with the same number in their groups hold the same
samples. Supernodes whose ranks do not divide into groups leave the groups to the numbers of the ranks.

The shuffle (DIMD 4.1, Algorithm 2): segment by segment, each sample goes to its new owner. On one node its sender
copies it there; between nodes samples are laid out by receiver and sent:

    rank 0   a b c d                 a d | b | c |                     a d  g  k     4 ranks, the first segment of each;
    rank 1   e f g h    ──copy─▶     g | e f | | h    ──exchange──▶    b  e f  l     received samples lie in the order
    rank 2   i j k l                 k | l | i | j                     c  i          of their senders
    rank 3   ...                                                       ...

Rounds: one for each segment, after two all_to_all exchanges. Bytes of each rank: on a node its samples, n / p, are read
once and written once; between nodes twice, and sent, less the n / p^2 that stay. Memory beside the samples: one
segment, free in the store or laid out, and spare capacity for random variation.

Arriving samples take the place of those that leave, without a second copy of the memory (compaction). In each round one
segment is sent, and its replacement is put at the other end. Here segments move from the beginning to the end:

    held         | 0 0 0 | 1 1 | . . . . |           9 rows, segments of 3 and 2
    round of 1   | 0 0 0 | 1 1 | . | 1'1'1' |        3 arrive, side by side in the order of their senders
    round of 0   | . . . | 0'0'0' | 1'1'1' |         3 again; the next shuffle moves back, beginning with 0'

If the memory is not enough, all ranks know it before any sample has moved.
"""

from __future__ import annotations

import math
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from unisono.data.options import DataOptions
from unisono.data.order import Numbers, ranks_of, share
from unisono.data.pack.index import Index
from unisono.data.pack.stripe import read_samples, views
from unisono.data.storage import Storage
from unisono.data.storage.free_memory import check_free_memory, node_memory
from unisono.data.storage.handing_over import LeftSamples, names_of
from unisono.data.storage.sample_store import Counts, SampleBuffer, SampleStore, block_of, blocks_of, nbytes_of
from unisono.errors import PackError
from unisono.placement import Placement
from unisono.schedules.pieces import bounds
from unisono.world import World

Owners = NDArray[np.integer]
"""Member of a group that holds each sample: its owner."""


def owners_in_epoch(order: Numbers, batch: int, member_of_rank: NDArray[np.integer], virtual: int = 0) -> Owners:
    """Return the owners in an epoch with this order, in the smallest dtype, since the access is random.

    `member_of_rank` has the number of each rank in its group.
    """
    members = member_of_rank.astype(np.min_scalar_type(int(member_of_rank.max())))
    held = np.empty(len(order), members.dtype)
    held[order] = members[ranks_of(len(order), batch, len(members), virtual)]
    return held


class Groups(NamedTuple):
    """Groups of ranks of one size."""

    group_of_rank: tuple[int, ...]
    member_of_rank: tuple[int, ...]
    """Number of each rank in its group: ranks of a group in ascending order."""
    note: str = ""
    """Line about groups that reach over supernodes though several are known; empty if there are none."""


def check_groups(samples: int, ranks: int, groups: int) -> int:
    """Return the members of a group. Raises PackError if `groups` does not divide the ranks or some would be empty."""
    if groups < 1 or ranks % groups:
        fits = [count for count in range(1, ranks + 1) if ranks % count == 0]
        raise PackError(f"{ranks} ranks cannot form {groups} groups of one size; {fits} can be formed")
    members = ranks // groups
    if members > samples:
        raise PackError(f"{members} ranks share {samples} samples, so some would hold none; start at most {samples}")
    return members


def form_groups(placement: Placement, groups: int) -> Groups:
    """Return `groups` groups, which divide the ranks: under one switch where its ranks divide, else by number of rank.

    >>> from unisono.placement import place
    >>> form_groups(place(range(4), [0, 1, 0, 1]), 2)
    Groups(group_of_rank=(0, 1, 0, 1), member_of_rank=(0, 0, 1, 1), note='')
    """
    ranks, members = range(placement.ranks), placement.ranks // groups
    supernodes = [placement.supernode_of(rank) for rank in ranks]
    sizes = [supernodes.count(supernode) for supernode in sorted(set(supernodes))]
    divided = not any(size % members for size in sizes)
    ordered = sorted(ranks, key=lambda rank: (supernodes[rank], placement.node_of(rank)) if divided else (0, rank))
    seats = {
        rank: (group, member)
        for group in range(groups)
        for member, rank in enumerate(sorted(ordered[group * members : (group + 1) * members]))
    }
    group_of_rank, member_of_rank = zip(*(seats[rank] for rank in ranks), strict=True)
    crossing = f"groups of {members} ranks are formed by number of rank: supernodes of {sizes} ranks do not divide"
    return Groups(group_of_rank, member_of_rank, "" if divided or groups == 1 else crossing)


SEGMENT_BYTES = 64 << 20
"""Approximate bytes that a rank exchanges at once."""

SPARE_DEVIATIONS = 5
"""Rows kept free for chance, over the square root of a rank's samples: one such root is the largest std."""


class PartitionPlan(NamedTuple):
    """Store that takes the stretch of a pack which a member of a group reads: `samples` and `blocks` of the largest."""

    samples: int
    blocks: int
    block: int
    """Bytes of a block."""
    segments: int
    """Segments of a partition, which are exchanged one by one."""

    def capacity(self, shared: bool) -> tuple[int, int]:
        """Return rows and blocks for the largest partition, with room for chance; if `shared`, a segment is free."""
        segment = -(-self.samples // self.segments) if shared else 0
        rows = self.samples + segment + SPARE_DEVIATIONS * math.isqrt(self.samples)
        return rows, -(-self.blocks * rows // self.samples)

    @property
    def nbytes(self) -> int:
        """Most bytes that a rank needs for its partition and its shuffle: a segment is free, or laid out besides."""
        return nbytes_of(np.array(self.capacity(shared=True)), self.block)


def plan_partition(lengths: NDArray[np.int32], members: int, segment_bytes: int = SEGMENT_BYTES) -> PartitionPlan:
    """Return the plan for samples of these lengths in bytes: as many samples for each member, up to one."""
    begins = [bounds(len(lengths), members, member)[0] for member in range(members)] + [len(lengths)]
    block = block_of(lengths)
    ends = np.concatenate([[0], blocks_of(lengths, block).cumsum(dtype=np.int64)])
    samples, blocks = int(np.diff(begins).max()), int(np.diff(ends[begins]).max())
    segments = max(1, -(-blocks * block // segment_bytes))
    return PartitionPlan(samples, blocks, block, segments)


class PartitionedStorage(Storage):
    """Samples of a pack in the memory of the ranks of `world`, in groups that hold a copy each."""

    def __init__(self, index: Index, world: World, options: DataOptions, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Read the pack, a copy for each of `options.groups` groups. Collective.

        Raises PackError on every rank if a rank cannot read its partition or it does not fit into its node.
        """
        super().__init__(len(index), world)
        self.members = check_groups(len(index), world.size, options.groups)
        self.groups = form_groups(world.placement, options.groups)
        self._member_of_rank, self.note = np.array(self.groups.member_of_rank), self.groups.note
        self._group = world if options.groups == 1 else world.split(self.groups.group_of_rank[world.rank])
        plan = plan_partition(index.length, self.members, segment_bytes)
        names, left, owners = self._take_over(index, plan)
        check_free_memory(world, plan.nbytes)
        shareable = self._group.nodes == 1 and self._group.size > 1
        shared = self._fits(plan.nbytes if shareable else 0) and shareable  # for a faster shuffle
        missing = np.flatnonzero(owners < 0)
        owners[missing] = ranks_of(len(missing), max(1, len(missing)), self.members)  # a stretch each
        assigned = owners == self._group.rank
        numbers, stretches = left.take(assigned)
        read = missing[assigned[missing]].astype(np.int32)
        held = np.concatenate([numbers, read])
        ends = np.concatenate([[0], blocks_of(index.length[held], plan.block).cumsum(dtype=np.int64)])
        rows = np.searchsorted(ends, ends[-1] * np.arange(plan.segments + 1) // plan.segments)
        rows[-1] = len(held)
        capacity = np.maximum(plan.capacity(shared), (len(held), ends[-1]))
        rank_names = None if names is None else names.with_name(f"{names.name}-{world.rank:05}")
        self._store = SampleStore(self._group, index.length, capacity, shared, rank_names)
        try:
            world.call_on_all(lambda: self._store.fill(held, chain(stretches, read_samples(index, read)), rows))
        except PackError:
            self.close()
            raise
        left.remove()
        if len(missing) < len(index):
            reused = f"{len(index) - len(missing):,} of {len(index):,} samples were left in memory"
            self.note += f"{'; ' * bool(self.note)}{reused}"
        self._owners: Owners = owners
        self._index_rows()

    def epoch(self, order: Numbers, batch: int, done: int = 0) -> None:  # noqa: ARG002  all move together
        """Shuffle, so that each rank holds what it will see of `order`; the same samples for any `done`. Collective."""
        self._give(owners_in_epoch(order, batch, self._member_of_rank, self.virtual))

    def give_stretches(self) -> None:
        """Shuffle, where samples were left by others, so that each rank holds a stretch of the pack. Collective."""
        self._give(ranks_of(self._count, self._count, self.members))

    def _give(self, owners: Owners) -> None:
        if np.array_equal(owners, self._owners):  # on all ranks alike, so none waits for another
            return
        shuffle(self._store, owners)
        self._owners = owners
        self._index_rows()

    def own(self, order: Numbers) -> Numbers:
        """Shuffle once, so that each rank has a random share of the classes, and return what this rank holds."""
        self.epoch(order, len(order))
        self._own = held = np.sort(share(order, len(order), 0, self.world.rank, self.world.size))
        return held

    def samples(self, numbers: Numbers) -> list[NDArray[np.uint8]]:
        """Return the bytes of this rank's samples, as views valid until the next epoch. Raises PackError for others."""
        wanted = numbers.astype(np.int32)
        positions = np.searchsorted(self._numbers, wanted).clip(max=max(0, len(self._numbers) - 1))
        if len(wanted) and not (len(self._numbers) and np.array_equal(self._numbers[positions], wanted)):
            raise PackError(
                f"rank {self.world.rank} does not hold all of the samples {wanted[:5].tolist()}...: another epoch has "
                "begun"
            )
        return self._store.samples(self._rows[positions])

    @property
    def numbers(self) -> NDArray[np.int32]:
        return self._numbers

    @property
    def nbytes(self) -> int:
        return self._store.nbytes

    def close(self) -> None:
        self._store.free()
        self._index_rows()
        if self._group is not self.world:
            self._group.free()

    def _take_over(self, index: Index, plan: PartitionPlan) -> tuple[Path | None, LeftSamples, Owners]:
        """Return how paths of samples begin that ranks leave to others; what was left; and who takes it, -1: nobody.

        What was left is removed where memory does not hold it twice, and nothing is left where it is short even then.
        """
        names, groups = names_of(index), self.groups.group_of_rank
        left = LeftSamples(self.world, names, index.length, plan.block)
        owners = left.owners([rank for rank, group in enumerate(groups) if group == groups[self.world.rank]])
        if names is not None:
            taken = index.length[owners == self._group.rank]
            need = np.array([len(taken), blocks_of(taken, plan.block).sum()])
            if not self._fits(max(plan.nbytes, nbytes_of(need, plan.block))):
                left.remove()
                left, owners[:] = LeftSamples(self.world, None, index.length, plan.block), -1
                names = names if self._fits(plan.nbytes) else None
        return names, left, owners

    def _fits(self, nbytes: int) -> bool:
        """Return True if shared memory holds `nbytes` of each rank, on all nodes."""
        return all(node.needed <= node.shared for node in node_memory(self.world, nbytes))

    def _index_rows(self) -> None:
        """Store the row of each sample that this rank holds, in the order of their numbers."""
        self._rows = np.argsort(self._store.numbers)
        self._numbers = self._store.numbers[self._rows]


def shuffle(store: SampleStore, owners: NDArray[np.integer]) -> None:
    """Move every sample to its new owner. Collective.

    All stores have the same number of segments. Raises PackError on every rank if more samples arrive than
    fit and a node has no more memory.
    """
    world = store.world
    if world.size == 1:
        return
    shortest = np.min_scalar_type(world.size - 1)  # the fastest to search
    to = owners.take(store.numbers).astype(shortest, copy=False)
    store.move()
    sent = store.counts(to)
    received = _transpose(world, sent)
    plan, begins = _plan(store, received)
    parts = np.split(to, store.rows[1:-1].tolist())
    if store.shared:
        for segment in plan.rounds:
            store.copy_segment(segment, parts[segment], store.buffers, begins[:, segment])
            world.barrier()
    else:
        rows, blocks = sent.sum(axis=0).max(axis=0).tolist()
        out = SampleBuffer(np.empty(rows, np.int32), np.empty((blocks, store.block), np.uint8))
        for segment in plan.rounds:
            laid_out = side_by_side(sent[:, segment])
            store.copy_segment(segment, parts[segment], [out] * world.size, laid_out)
            for kind, memory in enumerate(store.own):
                world.all_to_all_v(
                    views(torch.from_numpy(out[kind]), laid_out[:, kind], sent[:, segment, kind]),
                    views(torch.from_numpy(memory), plan.destinations[:, segment, kind], received[:, segment, kind]),
                )
    store.set_segments(plan.cuts, not store.at_start)


def _plan(store: SampleStore, received: Counts) -> tuple[CompactionPlan, Counts]:
    """Return this rank's plan, and where others put its samples, (ranks, segments, 2). Stores grow if necessary."""
    while True:
        plan = plan_compaction(store.cuts, received, store.capacity, store.at_start, not store.shared)
        granted = np.concatenate([plan.destinations, np.broadcast_to(plan.missing, (store.world.size, 1, 2))], axis=1)
        replies = _transpose(store.world, granted)
        missing = replies[:, -1].max(axis=0)
        if not missing.any():
            return plan, replies[:, :-1]
        store.grow(missing)


def _transpose(world: World, array: NDArray[np.int64]) -> NDArray[np.int64]:
    """Send entry r of an array to rank r; return the entries received from all ranks."""
    swapped: NDArray[np.int64] = world.all_to_all(torch.from_numpy(np.ascontiguousarray(array))).numpy()
    return swapped


def side_by_side(sizes: Counts) -> Counts:
    """Return where the parts of all ranks begin if they lie side by side, (ranks, ...), the first one at 0."""
    begins: Counts = sizes.cumsum(axis=0) - sizes
    return begins


class CompactionPlan(NamedTuple):
    """Plan of a rank for the samples that arrive."""

    cuts: Counts
    """Row and block at which its segments will begin and the last one end: (segments + 1, 2)."""
    destinations: Counts
    """Row and block at which the samples from each rank in each round are put: (ranks, segments, 2)."""
    rounds: range
    """Segments in the order in which they are sent."""
    missing: Counts
    """Rows and blocks that are missing, so that nothing still needed would be overwritten: (2,)."""


def plan_compaction(cuts: Counts, received: Counts, available: Counts, up: bool, laid_out: bool) -> CompactionPlan:
    """Return the plan of a rank whose segments lie between `cuts` and move to the other end of its memory, `available`.

    They move to the end if `up`, else to the beginning. `received` has the rows and blocks from each rank in each
    round, (ranks, segments, 2). If a segment is `laid_out` elsewhere before its replacement arrives, the replacement
    may overwrite it.
    """
    sizes = received.sum(axis=0)
    new = np.concatenate([np.zeros((1, 2), np.int64), sizes.cumsum(axis=0)])
    if up:
        new += available - new[-1]
    needed = cuts[:-1] if up == laid_out else cuts[1:]  # up to here, or from here on, in each round
    overlap = needed - new[:-1] if up else new[1:] - needed
    rounds = range(len(sizes))
    destinations = new[:-1] + side_by_side(received)
    return CompactionPlan(new, destinations, rounds[::-1] if up else rounds, overlap.max(axis=0).clip(min=0))
