"""Weights of one rank outside of steps, and the rule's memory: by bucket while steps run, in segments of parameters
while it is saved or moved.

    by bucket    anchor 1 │ w3 ....... w2 ...│   anchor 2 │ ... w2 ... w1 │      what tasks act on
    segments     {"anchor": [(3, 0, w3), (2, 0, first part of w2), (2, 700, second part of w2), (1, 0, w1)]}

A segment is (index of the parameter, its first element there, elements). So the memory is valid in any layout of
buckets, and a run that resumes with the same layout has the same bits.

    flats       own weights ──▶ copies, as buckets hold them
    centre      the model has the weights and buffers of a centre within a block (asynchronous rules)
    averaged    the model has the rule's anchor within a block, or the mean of all ranks' weights
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from unisono.reducer.bucket_memory import BucketMemory
from unisono.schedules.pieces import bounds
from unisono.step.replica import ANCHOR, RESIDUAL, SENT, SUM_RESIDUAL, RuleMemory
from unisono.step.rule import RankState

if TYPE_CHECKING:
    from unisono.reducer.programs import Programs

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

    def lay_out(self, keeps_anchor: bool) -> list[torch.Tensor]:
        """Prepare the memory for a step: by bucket, with an anchor of the present weights where there is none. Return
        the new anchors, which all ranks have at the same time."""
        if self._segments is not None:
            segments, self._segments = self._segments, None
            for key in self._memory.keys:
                self._load_bucket(key, segments)
        missing = [key for key in self._memory.keys if keeps_anchor and (ANCHOR, key) not in self.kept]
        for key in missing:
            self.kept[ANCHOR, key] = self._memory.read_weights(key)
        return [self.kept[ANCHOR, key] for key in missing]

    def segments(self) -> Segments:
        """Return a copy of the memory, in segments. No task may be running, and no exchange in flight."""
        if self._segments is not None:
            return self._segments
        segments: dict[str, list[Segment]] = {}
        for (name, key), tensor in self.kept.items():
            flats = {name: tensor, SUM: self._memory.bucket(key)} if name == SENT else {name: tensor}
            if name == SUM_RESIDUAL:
                flats[name] = torch.zeros_like(self._memory.bucket(key))
                flats[name][self._shard(key)] = tensor
            for index, here, part in self._memory.pieces(key):
                for label, contents in flats.items():
                    segments.setdefault(label, []).append((index, part.start, contents[here].clone()))
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
        put_weights(self._memory, {key: self.kept[ANCHOR, key] for key in self._memory.keys})
        return True

    def _shard(self, key: int) -> slice:
        return slice(*bounds(len(self._memory.bucket(key)), self._ranks, self._rank))

    def _load_bucket(self, key: int, segments: Segments) -> None:
        """Fill the memory of a bucket. A change in flight of which a part is missing is dropped: it is sent again."""
        elements = sum(here.stop - here.start for _, here, _ in self._memory.pieces(key))
        for name in segments:
            flat, covered = self._join(key, segments[name])
            if name == SUM or (covered < elements if name == SENT else not covered):
                continue
            if name == SUM_RESIDUAL:
                shard = self._shard(key)
                self.kept[SUM_RESIDUAL, key] = flat[shard].clone()
                flat[shard] = 0  # the rest was another shard's in the earlier layout: it goes with the next change
            if name in (SUM_RESIDUAL, RESIDUAL):
                self.kept.or_zeros(RESIDUAL, key, flat).add_(flat)
            else:
                self.kept[name, key] = flat
            if name == SENT:
                self._memory.fill_bucket(key, self._join(key, segments[SUM])[0])

    def _join(self, key: int, segments: Sequence[Segment]) -> tuple[torch.Tensor, int]:
        """Return a tensor like a bucket with the segments that lie in it, and the number of their elements."""
        flat, covered = torch.zeros_like(self._memory.bucket(key)), 0
        pieces = {index: (here.start - part.start, part) for index, here, part in self._memory.pieces(key)}
        for index, begin, tensor in segments:
            if index not in pieces:
                continue
            shift, part = pieces[index]
            low, high = max(part.start, begin), min(part.stop, begin + len(tensor))
            if low < high:
                flat[low + shift : high + shift] = tensor[low - begin : high - begin]
                covered += high - low
        return flat, covered


def without_changes(segments: Segments) -> Segments:
    """Return segments without changes in flight, which the weights still have."""
    return {name: content for name, content in segments.items() if name not in (SENT, SUM)}


def put_weights(memory: BucketMemory, flats: Mapping[int, torch.Tensor]) -> None:
    """Copy tensors like buckets, by key, to the model's weights."""
    memory.record_progress()  # what has read the weights before
    for key, flat in flats.items():
        memory.write_weights(key, flat)
    memory.join()


class ModelWeights:
    """Weights and buffers of one rank's model, which is not kept alive."""

    def __init__(self, model: torch.nn.Module, programs: Programs, wait: Callable[[], None]) -> None:
        """Find the weights of `programs`' model; `wait` waits for everything that is pending."""
        self._model, self._programs, self._wait = weakref.ref(model), programs, wait
        self._memory, self._buffers = programs.memory, programs.buffers

    def flats(self) -> dict[int, torch.Tensor]:
        """Return copies of the weights, by key, as buckets hold them: the beginning of a centre."""
        self._wait()
        return {key: self._memory.read_weights(key) for key in self._memory.keys}

    @contextmanager
    def centre(
        self, centre: Mapping[int, torch.Tensor], buffers: torch.Tensor | None, wait: bool = True
    ) -> Iterator[None]:
        """Give the model the weights and buffers of a centre within the block; `wait` for pending work first.

        No pass may be running.
        """
        if wait:
            self._wait()
        saved_weights, slots = {key: self._memory.read_weights(key) for key in centre}, self._buffers.slots
        saved_buffers = [None if (buffer := slot.current()) is None else buffer.clone() for slot in slots]
        with torch.no_grad():
            put_weights(self._memory, centre)
            if buffers is not None:
                self._buffers.flat.copy_(buffers)
                self._buffers.unpack()
            try:
                yield
            finally:
                put_weights(self._memory, saved_weights)
                for slot, before in zip(slots, saved_buffers, strict=True):
                    if before is not None and (now := slot.current()) is not None:
                        now.data.copy_(before)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Give the model, for an evaluation, the weights that all ranks have in common within the block, where theirs
        differ: the rule's anchor, or else their mean. Buffers are the mean of all ranks'."""
        self._wait()
        if not self._programs.traits.state.differs:
            yield
            return
        model, parameters = self._model(), self._memory.parameters
        buffers = () if model is None else model.buffers()
        tensors = [
            tensor.data for tensor in (*parameters, *buffers) if tensor.is_floating_point() or tensor.is_complex()
        ]
        local = [tensor.clone() for tensor in tensors]
        has_anchor = self._programs.traits.state is RankState.ANCHORED and self._programs.rule_memory.write_anchor()
        collectives = self._programs.collectives
        for tensor in tensors[len(parameters) if has_anchor else 0 :]:
            tensor.copy_(collectives.allreduce(tensor.div(collectives.size)))
        try:
            yield
        finally:
            for tensor, before in zip(tensors, local, strict=True):
                tensor.copy_(before)
