"""Memory that gradients are sent from. With a single node it is shared with the node's other ranks.

Parameters of split layers are in parts: who holds the same part averages it. 4 ranks with own samples; layer A is split
over the groups {0, 1} and {2, 3}, layer B over none:

    rank        0    1    2    3          summed over               weight of a rank
    A           a0   a1   a0   a1         {0, 2} and {1, 3}         samples of its group / samples of all
    B           b    b    b    b          all four                  samples of the rank / samples of all

The gradient of a part is a mean over the samples of the group, by which its layers weigh the losses of its ranks
(`tensor_parallel/layouts.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from unisono.optimizers.segments import PlacedSegment, Segment, segments_of
from unisono.placement import Partition, holders_of
from unisono.plan.bucket_layout import BucketSlice, MemoryLayout, memory_kinds, plan_memory, required_elements
from unisono.step.layout import Bucket
from unisono.world import World


@dataclass(frozen=True)
class ParameterParts:
    """Number of parts of each trainable parameter, and the groups of ranks that hold all parts of one."""

    counts: tuple[int, ...] = ()
    """Number of parts of each parameter, by its number; 1: every rank holds it whole. Empty: all are whole."""
    groups: Mapping[int, Partition] = field(default_factory=dict)
    """Groups whose member k holds part k, by the number of parts (2 or more)."""

    @cached_property
    def holders(self) -> Mapping[int, Partition]:
        """Ranks that hold the same part, for each part, by the number of parts."""
        return {count: holders_of(groups) for count, groups in self.groups.items()}

    def of(self, number: int) -> int:
        """Return the number of parts of a parameter: each is on one p-th of all ranks, a whole one on all."""
        return self.counts[number] if self.counts else 1

    def weight(self, weights: Sequence[float], rank: int, count: int, mean: bool) -> float:
        """Return the factor of gradients with `count` parts, of the mean of this rank's group: the group's share of the
        `weights` of all ranks' losses in a `mean`, the number of its losses that count in a sum."""
        ranks = next((group for group in self.groups.get(count, ()) if rank in group), (rank,))
        group, total = [weights[one] for one in ranks], sum(weights)
        if mean:
            return sum(group) / total if total else 0.0
        return float(sum(one > 0 for one in group))

    def holders_of(self, number: int, rank: int, ranks: int) -> Sequence[int]:
        """Return the ranks, of so many, that hold the same part of a parameter as `rank`."""
        groups = self.holders.get(self.of(number), ())
        return next((group for group in groups if rank in group), range(ranks))


UNSPLIT = ParameterParts()
"""No parameter is split."""


class BucketMemory:
    """Memory for the gradients of `parameters`, and its operations. All ranks of `world` construct it together."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        world: World,
        parts: ParameterParts = UNSPLIT,
        holders: Mapping[int, World] | None = None,
    ) -> None:
        """Allocate memory for parameters of which `parts` are split; `holders` has the world of the ranks that hold the
        same part as this one, by the number of parts."""
        self.parameters, self.parts = parameters, parts
        self._kinds = [_kind(parameter) for parameter in parameters]
        self._memories = memory_kinds(self._kinds, parts.counts)
        worlds = {1: world, **(holders or {})}
        elements = required_elements(self._kinds, parts.counts)
        self._flat = {kind: worlds[kind[1]].empty(length, kind[0]) for kind, length in elements.items()}
        self.views: list[torch.Tensor] = []
        """Gradient of each parameter, with the parameter's shape and strides."""
        self.layout = MemoryLayout((), {}, ())
        self._sent_buckets: tuple[BucketSlice, ...] = ()

    def lay_out(
        self, order: Sequence[int], largest: int, sequence: Sequence[int] = (), end_ratio: int = 1
    ) -> MemoryLayout:
        """Give every gradient a new place, for buckets that are sent in the order `sequence` (empty: as they fill).
        Return the layout; earlier contents are lost."""
        for flat in self._flat.values():
            flat.zero_()  # the gaps between gradients are summed with them
        self.layout = plan_memory(self._kinds, order, largest, self.parts.counts, end_ratio)
        buckets = self.layout.buckets
        self._sent_buckets = tuple(buckets[number] for number in sequence) or buckets
        self.views = [
            _view(self._flat[kind][start : start + length], parameter)
            for parameter, (length, _), kind, start in zip(
                self.parameters, self._kinds, self._memories, self.layout.starts, strict=True
            )
        ]
        return self.layout

    def plan(self, order: Sequence[int], largest: int, end_ratio: int = 1) -> list[Bucket]:
        """Return the buckets that `lay_out` would make, in the order in which they fill."""
        slices = plan_memory(self._kinds, order, largest, self.parts.counts, end_ratio).buckets
        return [self.bucket_of(one) for one in slices]

    def bucket_of(self, place: BucketSlice) -> Bucket:
        """Return a bucket as rules see it."""
        return Bucket(place.nbytes, place.parameters, groups=self.parts.holders.get(place.parts, ()))

    def bucket_slice(self, key: int) -> BucketSlice:
        """Return the place of the bucket with this key."""
        return self._sent_buckets[key - 1]

    def elements(self, bucket: BucketSlice) -> torch.Tensor:
        """Return the elements of a bucket that are sent, as a flat tensor."""
        return self._flat[bucket.memory][bucket.start : bucket.stop]

    def pack_weights(self, bucket: BucketSlice, ranks: int) -> None:
        """Write weights, divided by the number of ranks, into a bucket."""
        flat = self._flat[bucket.memory]
        for number, first, last, start in self.ranges(bucket):
            whole = self._in_order(self.parameters[number].detach(), number)
            torch.div(whole[first - start : last - start], ranks, out=flat[first:last])
        flat[bucket.flags : bucket.flags + len(bucket.ends)] = 0

    def read_weights(self, bucket: BucketSlice) -> torch.Tensor:
        """Return the weights of a bucket's parameters, where they would lie in it, with zeros elsewhere."""
        flat = torch.zeros(bucket.stop - bucket.start, dtype=bucket.dtype)
        for number, first, last, start in self.ranges(bucket):
            whole = self._in_order(self.parameters[number].detach(), number)
            flat[first - bucket.start : last - bucket.start] = whole[first - start : last - start]
        return flat

    def unpack_weights(self, bucket: BucketSlice) -> None:
        """Copy the contents of a bucket to the weights of its parameters."""
        self.write_weights(bucket, self.elements(bucket))

    def write_weights(self, bucket: BucketSlice, flat: torch.Tensor) -> None:
        """Copy a tensor like a bucket to the weights of its parameters."""
        for number, first, last, start in self.ranges(bucket):
            parameter, part = self.parameters[number].detach(), flat[first - bucket.start : last - bucket.start]
            if parameter.stride() == self.views[number].stride():
                self._in_order(parameter, number)[first - start : last - start] = part
            else:  # it is not dense: a copy that is takes the part, and is copied back
                view = self.views[number]
                dense = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype).copy_(parameter)
                self._in_order(dense, number)[first - start : last - start] = part
                parameter.copy_(dense)

    def ranges(self, bucket: BucketSlice) -> list[tuple[int, int, int, int]]:
        """Return, for each parameter in a bucket, its number, the start and the end of its part there, and the start of
        the whole."""
        found = []
        for number in bucket.parameters:
            start, length = self.layout.starts[number], self._kinds[number][0]
            found.append((number, max(bucket.start, start), min(bucket.flags, start + length), start))
        return found

    def segments(self, key: int, group: Sequence[int], rank: int) -> tuple[PlacedSegment, ...]:
        """Return the segments in a rank's shard of a bucket that the ranks of a group share: of its gradients, without
        the flags behind them."""
        bucket = self.bucket_slice(key)
        ranges = (
            (number, first - bucket.start, last - bucket.start, first - start)
            for number, first, last, start in self.ranges(bucket)
        )
        return segments_of(ranges, bucket.flags - bucket.start, len(group), group.index(rank))

    def segment_weights(self, segment: Segment) -> torch.Tensor:
        """Return the weights of a segment, flat; they may be the parameter's memory, and are not to be changed."""
        whole = self._in_order(self.parameters[segment.number].detach(), segment.number)
        return whole[segment.first : segment.last]

    def pack(self, bucket: BucketSlice, fresh: Mapping[int, torch.Tensor | None], weight: float) -> None:
        """Write gradients, times `weight`, into a bucket, and flags behind them. A gradient of None counts as zero."""
        flat = self._flat[bucket.memory]
        for number, first, last, start in self.ranges(bucket):
            into, gradient = flat[first:last], fresh[number]
            if gradient is None:
                into.zero_()
            elif weight != 1 or gradient.data_ptr() != self.views[number].data_ptr():
                whole = self._in_order(gradient, number)
                torch.mul(whole[first - start : last - start], weight, out=into)
        for place, number in enumerate(bucket.ends, bucket.flags):
            flat[place] = fresh[number] is not None

    def flags(self, bucket: BucketSlice) -> list[bool]:
        """Return, for each gradient that ends in the bucket, True where any rank had one."""
        there = self._flat[bucket.memory][bucket.flags : bucket.flags + len(bucket.ends)]
        return (there != 0).tolist()

    def _in_order(self, gradient: torch.Tensor, number: int) -> torch.Tensor:
        """Return a gradient's elements, flat, in memory order; complex ones as pairs."""
        view = self.views[number]
        if gradient.stride() != view.stride():
            gradient = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype).copy_(gradient)
        flat = gradient.as_strided((view.numel(),), (1,), gradient.storage_offset())
        return torch.view_as_real(flat.resolve_conj()).view(-1) if flat.is_complex() else flat


def _kind(parameter: torch.Tensor) -> tuple[int, torch.dtype]:
    """Return the count and the dtype of the numbers that are sent for a parameter. A complex element is a pair."""
    if parameter.is_complex():
        return 2 * parameter.numel(), parameter.dtype.to_real()
    return parameter.numel(), parameter.dtype


def _view(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return `flat` as a tensor with the shape and strides of a parameter."""
    elements = torch.view_as_complex(flat.view(-1, 2)) if parameter.is_complex() else flat
    return elements.as_strided(parameter.shape, _strides(parameter))


def _strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the parameter's own strides where it is dense (channels last is), else those of a contiguous tensor."""
    return torch.empty_like(parameter, device="meta").stride()
