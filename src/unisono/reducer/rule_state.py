"""Rule's memory of one rank: by bucket while steps run, in segments of parameters while it is saved or moved.

    by bucket    anchor 1 │ w3 ....... w2 ...│   anchor 2 │ ... w2 ... w1 │      what tasks act on
    segments     {"anchor": [(3, 0, w3), (2, 0, first part of w2), (2, 700, second part of w2), (1, 0, w1)]}

A segment is (number of the parameter, its first element there, elements). So the memory is valid in any layout of
buckets, and a run that resumes with the same layout has the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from unisono.reducer.bucket_memory import BucketMemory
from unisono.schedules.pieces import bounds
from unisono.step.replica import ANCHOR, RESIDUAL, SENT, SUM_RESIDUAL, RuleMemory

SUM = "sum"
"""Name of the segments of a sum of changes that no outer step has applied yet: contents of a bucket."""

Segment = tuple[int, int, torch.Tensor]
Segments = Mapping[str, Sequence[Segment]]


class RuleState:
    """Memory of the rule on one rank, which follows the layout of the buckets."""

    def __init__(self, memory: BucketMemory, rank: int, ranks: int) -> None:
        self._memory, self._rank, self._ranks = memory, rank, ranks
        self.kept = RuleMemory()
        """Memory by bucket, which tasks act on."""
        self._segments: Segments | None = None  # in place of `kept`

    def lay_out(self, keeps_anchor: bool) -> None:
        """Prepare the memory for a step: by bucket, with an anchor of the present weights where there is none."""
        if self._segments is not None:
            segments, self._segments = self._segments, None
            for key in self._memory.keys:
                self._load_bucket(key, segments)
        if keeps_anchor:
            for key in self._memory.keys:
                if (ANCHOR, key) not in self.kept:
                    self.kept[ANCHOR, key] = self._memory.read_weights(key)

    def gather(self) -> None:
        """Prepare the memory for a change of the layout. No task may be running."""
        self.load(self.segments())

    def segments(self) -> Segments:
        """Return a copy of the memory, in segments. No exchange may be in flight."""
        if self._segments is not None:
            return self._segments
        segments: dict[str, list[Segment]] = {}
        for (name, key), tensor in self.kept.items():
            flat = tensor
            if name == SUM_RESIDUAL:
                flat = torch.zeros_like(self._memory.bucket(key))
                flat[self._own(key)] = tensor
            flats = {name: flat, SUM: self._memory.bucket(key)} if name == SENT else {name: flat}
            for number, here, part in self._memory.pieces(key):
                for label, contents in flats.items():
                    segments.setdefault(label, []).append((number, part.start, contents[here].clone()))
        return segments

    def load(self, segments: Segments) -> None:
        """Replace the memory by segments. They are laid out for the next step."""
        self.kept.clear()
        self._segments = segments

    def write_anchor(self) -> bool:
        """Copy the anchor to the model's weights. Return False, with nothing copied, where no step has made one."""
        self.lay_out(keeps_anchor=False)
        if any((ANCHOR, key) not in self.kept for key in self._memory.keys):
            return False
        self._memory.record_progress()  # what has read the weights before
        for key in self._memory.keys:
            self._memory.write_weights(key, self.kept[ANCHOR, key])
        self._memory.join()
        return True

    def _own(self, key: int) -> slice:
        """Return this rank's shard of a bucket."""
        return slice(*bounds(len(self._memory.bucket(key)), self._ranks, self._rank))

    def _load_bucket(self, key: int, segments: Segments) -> None:
        """Fill the memory of a bucket. A change in flight of which a part is missing is dropped: it is sent again."""
        elements = sum(here.stop - here.start for _, here, _ in self._memory.pieces(key))
        for name in segments:
            flat, covered = self._join(key, segments[name])
            if name == SUM or (covered < elements if name == SENT else not covered):
                continue
            if name == SUM_RESIDUAL:
                own = self._own(key)
                self.kept[SUM_RESIDUAL, key] = flat[own].clone()
                flat[own] = 0  # the rest was another shard's in the earlier layout: it goes with the next change
            if name in (SUM_RESIDUAL, RESIDUAL):
                self.kept.or_zeros(RESIDUAL, key, flat).add_(flat)
            else:
                self.kept[name, key] = flat
            if name == SENT:
                self._memory.fill_bucket(key, self._join(key, segments[SUM])[0])

    def _join(self, key: int, segments: Sequence[Segment]) -> tuple[torch.Tensor, int]:
        """Return a tensor like a bucket with the segments that lie in it, and the number of their elements."""
        flat, covered = torch.zeros_like(self._memory.bucket(key)), 0
        pieces = {number: (here.start - part.start, part) for number, here, part in self._memory.pieces(key)}
        for number, begin, tensor in segments:
            if number not in pieces:
                continue
            shift, part = pieces[number]
            low, high = max(part.start, begin), min(part.stop, begin + len(tensor))
            if low < high:
                flat[low + shift : high + shift] = tensor[low - begin : high - begin]
                covered += high - low
        return flat, covered


def without_changes(segments: Segments) -> Segments:
    """Return segments without changes in flight, which the weights still have."""
    return {name: content for name, content in segments.items() if name not in (SENT, SUM)}
