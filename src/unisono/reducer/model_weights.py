"""Weights of a model outside of steps: flat copies, a centre's in their place, or those that all ranks have in common.

flats       own weights ──▶ copies, as buckets hold them
centre      the model has the weights and buffers of a centre within a block (asynchronous rules)
averaged    the model has the rule's anchor within a block, or the mean of all ranks' weights
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from unisono.reducer.programs import Programs
from unisono.step.rule import RankState


class ModelWeights:
    """Weights and buffers of one rank's model, which is not kept alive."""

    def __init__(self, model: torch.nn.Module, programs: Programs, wait: Callable[[], None]) -> None:
        """Find the weights of `programs`' model; `wait` waits for everything that is pending."""
        self._model, self._programs, self._wait = weakref.ref(model), programs, wait
        self._memory, self._buffers = programs.memory, programs.buffers

    def flats(self) -> dict[int, torch.Tensor]:
        """Return copies of the weights, by key, as buckets hold them: the beginning of a centre."""
        self._wait()
        return self._flats(self._memory.keys)

    @contextmanager
    def centre(
        self, centre: Mapping[int, torch.Tensor], buffers: torch.Tensor | None, wait: bool = True
    ) -> Iterator[None]:
        """Give the model the weights and buffers of a centre within the block; `wait` for pending work first."""
        if wait:
            self._wait()
        own, slots = self._flats(centre), self._buffers.slots
        own_buffers = [None if (buffer := slot.current()) is None else buffer.clone() for slot in slots]
        with torch.no_grad():
            self._put(centre)
            if buffers is not None:
                self._buffers.flat.copy_(buffers)
                self._buffers.unpack()
            try:
                yield
            finally:
                self._put(own)
                for slot, before in zip(slots, own_buffers, strict=True):
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
        tensors = [one.data for one in (*parameters, *buffers) if one.is_floating_point() or one.is_complex()]
        own = [tensor.clone() for tensor in tensors]
        has_anchor = self._programs.traits.state is RankState.ANCHORED and self._programs.rule_memory.write_anchor()
        collectives = self._programs.collectives
        for tensor in tensors[len(parameters) if has_anchor else 0 :]:
            tensor.copy_(collectives.allreduce(tensor.div(collectives.size)))
        try:
            yield
        finally:
            for tensor, before in zip(tensors, own, strict=True):
                tensor.copy_(before)

    def _flats(self, keys: Iterable[int]) -> dict[int, torch.Tensor]:
        """Return copies of the weights in these buckets. No pass may be running."""
        return {key: self._memory.read_weights(key) for key in keys}

    def _put(self, flats: Mapping[int, torch.Tensor]) -> None:
        self._memory.record_progress()  # what has read the weights before
        for key, flat in flats.items():
            self._memory.write_weights(key, flat)
        self._memory.join()
