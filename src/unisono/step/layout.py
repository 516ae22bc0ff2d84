"""Layout of a model, as rules see it: its parameters, the buckets that are exchanged, and who updates the weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from unisono.placement import Partition


class Bucket(NamedTuple):
    """Gradients that are exchanged together."""

    nbytes: int
    parameters: tuple[int, ...]
    """Numbers of the parameters in it, whole or in part."""
    ranges: tuple[tuple[int, int], ...] = ()
    """First and last element (exclusive) of each parameter in it; empty where all lie in it whole."""
    groups: tuple[tuple[int, ...], ...] = ()
    """Ranks in groups, each of which holds one part of split parameters and averages it; empty: one group of all."""


class ActivationExchange(NamedTuple):
    """Exchange of a split layer's activations, or of their gradients, in its groups: computing waits for it."""

    parameter: int
    """Number of the layer's parameter."""
    nbytes: float
    """Bytes that a rank sends."""
    groups: tuple[tuple[int, ...], ...]
    """Ranks in groups, each of which splits the layer."""
    backward: bool = False
    """True in the backward pass."""
    after: bool = False
    """True behind the layer's products of that pass, False before them."""


class Updates(Enum):
    """Ways to apply the gradients to the weights."""

    PARTS = "parts"
    """Optimizer's step in parts, one for each bucket as soon as it is ready."""
    WHOLE = "whole"
    """Optimizer's step as a whole when all buckets are ready: it, or its hooks, see all gradients together."""
    OUTSIDE = "outside"
    """Update by the user's loop, after it has waited for all buckets."""


@dataclass(frozen=True)
class Layout:
    """Model as a rule sees it. Parameters are numbered from 0, buckets have keys from 1 in the order of exchange."""

    ranks: int
    parameters: int
    buckets: tuple[Bucket, ...]
    filled: tuple[int, ...] = ()
    """Keys in the order in which the buckets fill; empty means the order of exchange."""
    needed: tuple[int, ...] = ()
    """Parameters in the order in which a forward pass reads them; empty means the order of their numbers."""
    updates: Updates = Updates.PARTS
    deferred: bool = True
    """True where each parameter is waited for when the next forward pass reads it."""
    clip: float | None = None
    """Largest norm of all gradients together; None does not clip."""
    buffers: bool = False
    """True where rank 0's buffers (running means of batch norms) are sent with the gradients."""
    layer_norms: bool = False
    """True where the optimizer's step needs norms of whole layers (LARS, LAMB), of which ranks have shards or parts."""
    halves: tuple[int, ...] = ()
    """Order in which a sharded rule exchanges the halves of buckets: each key twice, its reduce-scatter first. Empty:
    all reduce-scatters, then the all-gathers."""
    activations: tuple[ActivationExchange, ...] = ()
    """Exchanges of split layers in a step, which programs show where layers are split by prediction."""
    nodes: Partition = ()
    """Ranks of each node, in the order of their first ranks; empty where they are not known."""
    order: tuple[int, ...] = field(init=False)
    """Parameters in the order in which forward passes read them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", self.needed or tuple(range(self.parameters)))
        object.__setattr__(self, "filled", self.filled or self.keys)

    @property
    def keys(self) -> tuple[int, ...]:
        """Keys of the buckets in the order of exchange."""
        return tuple(range(1, len(self.buckets) + 1))

    def bucket(self, key: int) -> Bucket:
        """Return the bucket with this key."""
        return self.buckets[key - 1]

    def group_of(self, key: int, rank: int | None) -> tuple[int, ...]:
        """Return the ranks that average a bucket with this rank; all ranks for a key without a bucket."""
        groups = self.bucket(key).groups if 0 < key <= len(self.buckets) else ()
        return next((group for group in groups if rank in group), tuple(range(self.ranks)))

    @cached_property
    def exchanges(self) -> dict[tuple[int, bool, bool], tuple[int, ...]]:
        """Numbers of the exchanges of activations, by parameter, backward and after."""
        indices: dict[tuple[int, bool, bool], tuple[int, ...]] = {}
        for index, exchange in enumerate(self.activations):
            key = exchange.parameter, exchange.backward, exchange.after
            indices[key] = (*indices.get(key, ()), index)
        return indices

    @cached_property
    def phases(self) -> tuple[Partition, ...]:
        """Partitions of the ranks for the phases of a sum: into nodes, and into the nodes' first ranks and all others.
        Empty where all ranks are on one node, or each has a node of its own."""
        if not 1 < len(self.nodes) < self.ranks:
            return ()
        firsts = tuple(node[0] for node in self.nodes)
        return self.nodes, (firsts, tuple(rank for rank in range(self.ranks) if rank not in firsts))

    @property
    def split(self) -> bool:
        """True where some parameters are split over ranks."""
        return any(bucket.groups for bucket in self.buckets)

    @cached_property
    def keys_of(self) -> tuple[tuple[int, ...], ...]:
        """Keys of the buckets that hold each parameter, by its number."""
        keys: list[list[int]] = [[] for _ in range(self.parameters)]
        for key, bucket in enumerate(self.buckets, 1):
            for parameter in bucket.parameters:
                keys[parameter].append(key)
        return tuple(map(tuple, keys))

    @cached_property
    def complete(self) -> tuple[tuple[int, ...], ...]:
        """Parameters that are complete once a bucket has been exchanged, by key; key 0: those in no bucket."""
        alone = tuple(parameter for parameter, keys in enumerate(self.keys_of) if not keys)
        return (alone, *(tuple(sorted(parameters)) for parameters in self._first_in(self.keys[::-1])[1:]))

    @cached_property
    def ready(self) -> tuple[tuple[int, ...], ...]:
        """Parameters whose gradient comes first in a bucket, as the buckets fill, by key from 0 on."""
        return self._first_in(self.filled)

    @cached_property
    def last(self) -> tuple[tuple[int, ...], ...]:
        """Parameters whose gradient comes last in a bucket, as the buckets fill, by key from 0 on."""
        return self._first_in(self.filled[::-1])

    def _first_in(self, order: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return, by key from 0 on, the parameters that no bucket before it in this order of keys holds."""
        first: list[tuple[int, ...]] = [()] * (len(self.buckets) + 1)
        seen: set[int] = set()
        for key in order:
            first[key] = tuple(parameter for parameter in self.bucket(key).parameters if parameter not in seen)
            seen.update(first[key])
        return tuple(first)


def even_layout(ranks: int, buckets: int, nbytes: int = 1 << 20) -> Layout:
    """Return the layout of `buckets` parameters of one size, each a bucket of its own: for drawings and tests."""
    return Layout(ranks, buckets, tuple(Bucket(nbytes, (parameter,)) for parameter in reversed(range(buckets))))
