"""Memory that gradients are sent from. With a single node it is shared with the node's other ranks.

Those of a model on a device lie there, in memory like it (`device_copies.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from unisono.device import device_of
from unisono.optimizers.sharded import PlacedSegment, Segment, dense_strides, in_order, segments_of
from unisono.plan.bucket_layout import BucketSlice, MemoryKind, memory_kinds, plan_memory, required_elements
from unisono.reducer.device_copies import BucketCopies
from unisono.reducer.parameter_parts import UNSPLIT, ParameterParts
from unisono.step.layout import Bucket
from unisono.world import World


class BucketPiece(NamedTuple):
    """Part of a parameter that lies in a bucket."""

    parameter: int
    here: slice
    """Its elements in the bucket."""
    part: slice
    """Its elements in the parameter, in the order of the parameter's memory."""


FREED_BYTES = (32 << 20) - (64 << 10)
"""Bytes of the largest block by which glibc adapts: those as large or smaller are not returned when they are freed."""


class BucketMemory:
    """Memory for the gradients of `parameters`, in buckets whose keys are their places in the order of sending, from 1
    on. All ranks of `world` construct it together."""

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
        self.strides = [*map(dense_strides, parameters)]
        """Strides of each gradient, and of what optimizers and rules keep: a parameter may be laid out anew later."""
        # count and dtype of the numbers that are sent: a complex element is a pair
        self._kinds = [(each.numel() * (1 + each.is_complex()), each.dtype.to_real()) for each in parameters]
        self._memories = memory_kinds(self._kinds, parts.counts)
        worlds = {1: world, **(holders or {})}
        elements = required_elements(self._kinds, parts.counts)
        self._flat = {kind: worlds[kind[1]].empty(length, kind[0]) for kind, length in elements.items()}
        device = device_of(parameters, "a model") if parameters else torch.device("cpu")
        self.copies: BucketCopies | None = None
        """Copies of the buckets, where the parameters are on a device."""
        if device.type != "cpu":
            self.copies = BucketCopies(device, self._flat, world.device_transports(device).stays)
        else:
            # glibc keeps up to 64 MB of freed memory once a program has freed a tensor of half as much: else the
            # gradients of each step have new pages, each of which costs the kernel a microsecond or two
            torch.empty(FREED_BYTES, dtype=torch.uint8, device="cpu")
        self._gradients = self._flat if self.copies is None else self.copies.flat  # where gradients lie
        self.views: list[torch.Tensor] = []
        """Gradient of each parameter, with the parameter's shape and strides."""
        self.starts: Sequence[int] = ()
        """First element of each parameter, in the memory of its kind."""
        self.buckets: tuple[Bucket, ...] = ()
        """Buckets as rules see them, in the order of their keys."""
        self.filled: tuple[int, ...] = ()
        """Keys in the order in which the buckets fill."""
        self._places: tuple[BucketSlice, ...] = ()
        self._pieces: list[list[BucketPiece]] = []
        self._segments: dict[tuple[int, tuple[int, ...], int], tuple[PlacedSegment, ...]] = {}

    def lay_out(self, order: Sequence[int], largest: int, sequence: Sequence[int] = (), end_ratio: int = 1) -> None:
        """Give every gradient a new place, for buckets that are sent in the order `sequence` (empty: as they fill).

        Earlier contents are lost, but those that are gradients of parameters: averages move with their places."""
        present = [index for index, view in enumerate(self.views) if lies_in(self.parameters[index].grad, view)]
        averages = {index: self.views[index].clone() for index in present}
        for key in self.keys:
            self._finish_copies(key)
        for flat in (*self._flat.values(), *self._gradients.values()):
            flat.zero_()  # the gaps between gradients are summed with them
        self.starts, _, slices = plan_memory(self._kinds, order, largest, self.parts.counts, end_ratio)
        sequence = sequence or range(len(slices))
        self._places = tuple(slices[index] for index in sequence)
        self.buckets = tuple(map(self._bucket_of, self._places))
        keys = {index: key for key, index in enumerate(sequence, 1)}
        self.filled = tuple(keys[index] for index in range(len(slices)))
        self.views = [
            _view(self._gradients[kind][start : start + length], parameter, strides)
            for parameter, strides, (length, _), kind, start in zip(
                self.parameters, self.strides, self._kinds, self._memories, self.starts, strict=True
            )
        ]
        for index, average in averages.items():
            self.parameters[index].grad = self.views[index].copy_(average).detach()
        self._pieces = [[self._piece_of(index, place) for index in place.parameters] for place in self._places]
        self._segments.clear()

    def plan(self, order: Sequence[int], largest: int, end_ratio: int = 1) -> list[Bucket]:
        """Return the buckets that `lay_out` would make, in the order in which they fill."""
        return [*map(self._bucket_of, plan_memory(self._kinds, order, largest, self.parts.counts, end_ratio).buckets)]

    def _piece_of(self, index: int, place: BucketSlice) -> BucketPiece:
        start, length = self.starts[index], self._kinds[index][0]
        first, last = max(place.start, start), min(place.flags, start + length)
        return BucketPiece(index, slice(first - place.start, last - place.start), slice(first - start, last - start))

    def _bucket_of(self, place: BucketSlice) -> Bucket:
        return Bucket(place.nbytes, place.parameters, groups=self.parts.holders.get(place.parts, ()))

    @property
    def keys(self) -> range:
        return range(1, len(self._places) + 1)

    def place(self, key: int) -> BucketSlice:
        return self._places[key - 1]

    def bucket(self, key: int) -> torch.Tensor:
        """Return the elements of a bucket that are sent, as a flat tensor, once its copies have ended."""
        self._finish_copies(key)
        place = self.place(key)
        return self._flat[place.memory][place.start : place.stop]

    def sums(self, key: int) -> torch.Tensor:
        """Return the part of a bucket that holds gradients, without the flags behind it."""
        self._finish_copies(key)
        return self._sums(key, self._flat)

    def _sums(self, key: int, memory: Mapping[MemoryKind, torch.Tensor]) -> torch.Tensor:
        place = self.place(key)
        return memory[place.memory][place.start : place.flags]

    def _finish_copies(self, key: int) -> None:
        if self.copies is not None:
            self.copies.finish_copies(key)

    def flags(self, key: int) -> torch.Tensor:
        """Return the part of a bucket that holds flags: nonzero for a gradient that ends in it, if any rank has one."""
        place = self.place(key)
        return self._flat[place.memory][place.flags : place.stop]

    def present(self, key: int) -> dict[int, bool]:
        """Return, for each gradient that ends in a bucket, True where any rank had one."""
        ends = self.place(key).ends
        flags = self.flags(key)[: len(ends)]
        present = flags.view(torch.uint8).view(len(flags), flags.itemsize).any(1)  # numbers, or integers
        return dict(zip(ends, present.tolist(), strict=True))

    def pieces(self, key: int) -> Sequence[BucketPiece]:
        """Return the piece of each parameter in a bucket."""
        return self._pieces[key - 1]

    def arrivals(self, key: int) -> Iterator[torch.Tensor]:
        """Yield the elements of a bucket that are sent, in parts, each as soon as it may be sent."""
        if self.copies is None or not len(sums := self._sums(key, self._flat)):
            yield self.bucket(key)
            return
        if (yield from self.copies.staying(key)):
            yield self.flags(key)
            return
        last = slice(0, 0)
        for piece in self.copies.arrivals(key):
            if last.stop:
                yield sums[last]
            last = piece
        place = self.place(key)
        yield self._flat[place.memory][place.start + last.start : place.stop]  # with the flags

    def outgoing(self, key: int) -> AbstractContextManager[Any]:
        """Return a context for reads of a bucket's gradients by the host, behind what has computed them."""
        return nullcontext() if self.copies is None else self.copies.outgoing(key)

    def incoming(self, marked: bool = False) -> AbstractContextManager[Any]:
        """Return a context for other work: behind all that has come from the host, and the newest mark if `marked`."""
        return nullcontext() if self.copies is None else self.copies.incoming(marked)

    def record_progress(self, key: int = 0) -> None:
        """Record where the program's computing is: the gradients of a bucket are complete, or weights are read."""
        if self.copies is not None:
            self.copies.record_progress(key)

    def join(self) -> None:
        """Let the program's computing wait for all that has come from the host."""
        if self.copies is not None:
            self.copies.join()

    def free_buckets(self) -> None:
        """Copy the gradients that lie in the buckets, but not where their own place is, as swapped or transposed ones:
        a pass is about to write there."""
        storages = {flat.untyped_storage().data_ptr() for flat in self._gradients.values()}
        for parameter, view in zip(self.parameters, self.views, strict=True):
            gradient = parameter.grad
            if type(gradient) is not torch.Tensor or gradient.layout is not torch.strided or gradient.is_set_to(view):
                continue
            if gradient.untyped_storage().data_ptr() in storages:
                parameter.grad = gradient.clone()

    def pack(
        self,
        key: int,
        fresh: Mapping[int, torch.Tensor | None],
        weight: float,
        placed: Mapping[int, float] = MappingProxyType({}),
    ) -> None:
        """Write gradients, times `weight`, into a bucket, and flags behind them. A gradient of None counts as zero;
        those that are `placed` lie there, times that weight."""
        flat = self._sums(key, self._gradients)
        if self.copies is not None:
            with self.copies.outgoing(key) as stream:
                self._gather(key, fresh, flat, stream)
                if weight != 1:
                    flat.mul_(weight)
                self.copies.fetch(key, self._sums(key, self._flat), flat)
        else:
            for index, here, part in self._pieces[key - 1]:
                gradient = fresh[index]
                if gradient is None:
                    flat[here].zero_()
                elif index in placed:
                    if weight != placed[index]:
                        flat[here].mul_(weight / placed[index])
                elif weight != 1 or not lies_in(gradient, self.views[index]):
                    torch.mul(self.in_order(gradient, index)[part], weight, out=flat[here])
        ends = self.place(key).ends
        present = [fresh[index] is not None for index in ends]
        flags = 1 if all(present) else torch.tensor(present, device="cpu")  # one call, however many parameters
        self.flags(key)[: len(ends)] = flags

    def _gather(self, key: int, fresh: Mapping[int, torch.Tensor | None], flat: torch.Tensor, stream: Any) -> None:
        """Copy gradients into a device's bucket, all by one call: each costs the host as much as the device."""
        targets, gradients = list[torch.Tensor](), list[torch.Tensor]()
        for index, here, part in self._pieces[key - 1]:
            gradient = fresh[index]
            if gradient is None:
                flat[here].zero_()
                continue
            gradient.record_stream(stream)  # it may be freed before it was read
            if not lies_in(gradient, self.views[index]):
                targets.append(flat[here])
                gradients.append(self.in_order(gradient, index)[part])
        if targets:
            torch._foreach_copy_(targets, gradients)

    def unpack(self, key: int) -> None:
        """Begin to copy the sums of a bucket to where its gradients lie."""
        if self.copies is not None:
            self.copies.send(key, self._sums(key, self._flat), self._sums(key, self._gradients))

    def pack_weights(self, key: int, ranks: int) -> None:
        """Write weights, divided by the number of ranks, into a bucket."""
        flat = self._sums(key, self._gradients)
        with self.incoming(marked=True):
            for index, here, part in self._pieces[key - 1]:
                torch.div(self.in_order(self.parameters[index].detach(), index)[part], ranks, out=flat[here])
            if self.copies is not None:
                self.copies.fetch(key, self._sums(key, self._flat), flat)
        self.flags(key)[: len(self.place(key).ends)] = 0

    def read_weights(self, key: int) -> torch.Tensor:
        """Return the weights of a bucket's parameters, where they would lie in it, with zeros elsewhere."""
        flat = torch.zeros_like(self.bucket(key))
        with self.incoming(marked=True):
            for index, here, part in self._pieces[key - 1]:
                flat[here] = self.in_order(self.parameters[index].detach(), index)[part]
        return flat

    def write_weights(self, key: int, flat: torch.Tensor) -> None:
        """Copy a tensor like a bucket to the weights of its parameters."""
        with self.incoming(marked=True):
            given = flat if self.copies is None else flat.to(self.parameters[0].device)
            for index, here, part in self._pieces[key - 1]:
                parameter, view = self.parameters[index].detach(), self.views[index]
                if parameter.stride() == view.stride() and not parameter.is_conj():
                    self.in_order(parameter, index)[part] = given[here]
                else:  # it is not dense, or a conjugate view: a copy that is takes the part, and is copied back
                    dense = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device=view.device)
                    self.in_order(dense.copy_(parameter), index)[part] = given[here]
                    parameter.copy_(dense)

    def fill_bucket(self, key: int, flat: torch.Tensor) -> None:
        self.bucket(key).copy_(flat)

    def segments(self, key: int, group: tuple[int, ...], rank: int) -> tuple[PlacedSegment, ...]:
        """Return the segments in a rank's shard of a bucket that the ranks of a group share: of its gradients, without
        the flags behind them."""
        if (asked := (key, group, rank)) not in self._segments:
            place, pieces = self.place(key), self._pieces[key - 1]
            self._segments[asked] = segments_of(pieces, place.flags - place.start, len(group), group.index(rank))
        return self._segments[asked]

    def segment_weights(self, segment: Segment) -> torch.Tensor:
        """Return the weights of a segment, flat; they may be the parameter's memory, and are not to be changed."""
        weights = self.in_order(self.parameters[segment.parameter].detach(), segment.parameter)
        return weights[segment.first : segment.last]

    def in_order(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """Return the elements of a tensor like a parameter, flat, in the order of the parameter's memory."""
        return in_order(tensor, self.strides[index])


def lies_in(gradient: torch.Tensor | None, view: torch.Tensor) -> bool:
    """Return True where a gradient begins where a view does: it is the one that an average has set."""
    if gradient is None or gradient.layout is not torch.strided or gradient.device != view.device:
        return False
    return gradient.data_ptr() == view.data_ptr()


def distinct(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor that have memory of their own: `expand` repeats them where the stride is 0."""
    if tensor.layout is not torch.strided:
        return tensor
    return tensor[tuple(slice(None if stride else 1) for stride in tensor.stride())]


def _view(flat: torch.Tensor, parameter: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return `flat` as a tensor like a parameter, with these strides."""
    elements = torch.view_as_complex(flat.view(-1, 2)) if parameter.is_complex() else flat
    return elements.as_strided(parameter.shape, strides)
