"""Work of one rank on its shards of all buckets in one step: what replicas do for operations of `rules/sharded.py`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from unisono.optimizers.layerwise import norm
from unisono.optimizers.sharded import PlacedSegment, Segment, SegmentUpdate, ShardedStep
from unisono.step.layout import Layout
from unisono.transports.exact import sum_of_squares


class ShardWork:
    """Shards of a rank: gradients before the update, weights after it, both where they lie in their buckets."""

    def __init__(
        self,
        layout: Layout,
        segments: Mapping[int, Sequence[PlacedSegment]],
        sums: Callable[[int], torch.Tensor],
        weights_of: Callable[[Segment], torch.Tensor],
        step: ShardedStep | None = None,
        computing: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Store the segments by key. `sums` returns the gradients of a bucket, `weights_of` those of a segment, which
        are not changed; in the context of `computing` weights are read."""
        self._layout, self._segments, self._sums, self._weights_of = layout, segments, sums, weights_of
        self._computing = computing
        self.step = step
        """Step of the optimizer; None where the program has left it out: weights stay as they are."""
        self.presence: dict[int, torch.Tensor] = {}
        """Flags by bucket: nonzero for each parameter in it that has a gradient; to be summed over the ranks."""

    def set_presence(self, key: int, gradients: Mapping[int, torch.Tensor | None]) -> None:
        """Record the parameters of a bucket that have a gradient on this rank, in their order there."""
        flags = [gradients[parameter] is not None for parameter in self._layout.bucket(key).parameters]
        self.presence[key] = torch.tensor(flags, dtype=torch.float32, device="cpu")

    def remove(self, parameters: Collection[int]) -> None:
        """Count these parameters as without a gradient on any rank: they are not updated."""
        for key, flags in self.presence.items():
            for place, parameter in enumerate(self._layout.bucket(key).parameters):
                if parameter in parameters:
                    flags[place] = 0

    def present(self, key: int) -> dict[int, bool]:
        """Return, for each parameter in a bucket, True where any rank has a gradient."""
        flags = (self.presence[key] != 0).tolist()
        return dict(zip(self._layout.bucket(key).parameters, flags, strict=True))

    def clip(self, limit: float, world: Any, exact: bool = False) -> None:
        """Scale the gradients of all shards so that the norm of all ranks' shards together is at most `limit`. With
        `exact` its bits do not depend on the shards."""
        updates = [update for key in self._layout.keys for update in self._updates(key)]
        if exact:
            parts = [(update.segment.parameter, update.gradient) for update in updates]
            total = sum_of_squares(world, parts, self._layout.parameters).sum()
        else:
            norms = [norm(update.gradient).double() for update in updates]
            zero = torch.zeros((), dtype=torch.float64, device="cpu")
            total = torch.stack(norms or [zero]).square().sum().reshape(1)
            world.allreduce(total)
        factor = torch.clamp(limit / (total.sqrt() + 1e-6), max=1.0)
        for update in updates:
            update.gradient.mul_(factor.to(update.gradient.dtype))

    def sum_norms(self, world: Any, exact: bool = False) -> None:
        """Sum the squares of the norms of whole layers over the ranks, for an optimizer that needs them."""
        count = self._layout.parameters
        with self._computing():
            updates = (update for key in self._layout.keys for update in self._updates(key))
            parts = [] if self.step is None else self.step.measure(list(updates))
            if exact:
                numbered = [
                    (parameter + column * count, part) for parameter, *pair in parts for column, part in enumerate(pair)
                ]
                squares = sum_of_squares(world, numbered, 2 * count).view(2, count).T
            else:
                squares = torch.zeros(count, 2, dtype=torch.float64, device="cpu")
                for parameter, *pair in parts:
                    squares[parameter] += (torch.stack([norm(part).double() for part in pair]) ** 2).cpu()
        if not exact:
            world.allreduce(squares)
        if self.step is not None:
            self.step.set_norms(squares)

    def update(self, key: int) -> None:
        """Replace the gradients in this rank's shard of a bucket by updated weights."""
        flat = self._sums(key)
        with self._computing():
            updates = self._updates(key, copied=True)
            if self.step is not None:
                self.step.update(updates)
            updated = {update.segment: update.weights for update in updates}
            for segment, start in self._segments[key]:
                weights = updated[segment] if segment in updated else self._weights_of(segment)
                flat[start : start + segment.last - segment.first] = weights

    def _updates(self, key: int, copied: bool = False) -> list[SegmentUpdate]:
        """Return the segments in a bucket of which any rank has a gradient; with copies of their weights on demand."""
        flat, present, updates = self._sums(key), self.present(key), list[SegmentUpdate]()
        for segment, start in self._segments[key]:
            if present[segment.parameter]:
                weights = self._weights_of(segment)
                gradient = flat[start : start + segment.last - segment.first]
                updates.append(SegmentUpdate(segment, weights.clone() if copied else weights, gradient))
        return updates
