"""Replica of a model on one rank in one pass: its gradients, and the work of the program's tasks on them.

Operations of step programs (`step/operations.py`, `rules/sharded.py`, `rules/easgd.py`) call its methods, most of them
the one of their name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from unisono.asynchronous.exchange import WorkerExchange
from unisono.errors import UnisonoError
from unisono.optimizers.layerwise import SumNorms
from unisono.optimizers.sharded import ShardedStep
from unisono.reducer.bucket_memory import lies_in
from unisono.reducer.control import ControlMessage, decode, difference_of, encode
from unisono.reducer.parameter_parts import norm_of_all
from unisono.reducer.programs import Programs
from unisono.reducer.scattered_gradient import GradientUse, StepResult, step_numbers, step_result
from unisono.reducer.structure import digest
from unisono.step.layout import Layout
from unisono.step.operations import PACK, PACK_SUM
from unisono.step.program import Operation
from unisono.step.shard_work import ShardWork
from unisono.transports.exact import Gradients, Terms, integers
from unisono.world import World

Update = Callable[[Sequence[int], SumNorms | None], None]
"""Optimizer's step for these parameters, given by index, with the function that completes norms of layers."""


class ModelReplica:
    """Gradients of one pass on one rank, and the work of its tasks."""

    exchange: WorkerExchange | None = None
    """This worker's end of its exchanges with servers, where the rule has some."""

    def __init__(
        self, programs: Programs, layout: Layout, message: ControlMessage, update: Update | None = None
    ) -> None:
        self.memory, self.layout, self.message = programs.memory, layout, message
        self.kept = programs.rule_memory.kept
        """Tensors that the rule keeps between steps."""
        self._buffers, self._update = programs.buffers, update
        self.gradients: Gradients = {}
        """Gradient of each parameter that is ready; None where there is none."""
        self.placed: dict[int, float] = {}
        """Weight of each gradient that lies in its buckets since it was ready."""
        self.weight = 1.0
        """Factor of the gradients before they are summed; known once all ranks' samples are."""
        self.discarded = False
        """True once the pass has failed: it has no further effect."""
        self.buffers_pending = False
        """True while rank 0's buffers are being sent, or have arrived and were not copied to the model."""
        self.lock = Lock()
        """Lock held while the pass is discarded, and while gradients are set."""
        self._samples = 0.0  # of all ranks
        self._averages: dict[int, torch.Tensor] = {}  # of earlier passes, where this rank has no samples
        self._exact, self._virtual, virtual = programs.exact, programs.virtual is not None, programs.virtual
        self._shares = [] if virtual is None else virtual.kept
        self._samples_of_pass = 0.0 if virtual is None else virtual.samples
        self._loss_weights: Sequence[float] = ()  # of all ranks, where parameters are split
        self._rank = programs.collectives.rank
        self._unpacked_parts = [len(keys) for keys in layout.keys_of]
        self._unset_parts = list(self._unpacked_parts)
        self._has_gradient: dict[int, bool] = {}
        self._norm: torch.Tensor | None = None  # of all ranks' gradients, where parameters are split
        memory = self.memory
        self.bucket, self.arrivals, self.sums, self.flags = memory.bucket, memory.arrivals, memory.sums, memory.flags
        if (exact := programs.exact) is not None:
            self.integers, self.maxima, self.decode = exact.integers, exact.maxima, exact.decode
            self.arrivals = lambda key: map(integers, memory.arrivals(key))
        self.read_weights, self.write_weights = memory.read_weights, memory.write_weights
        self.pack_weights, self.fill_bucket = memory.pack_weights, memory.fill_bucket

    def discard(self) -> None:
        """Discard the pass: running tasks set no gradient from here on."""
        with self.lock:
            self.discarded = True

    def step_error(self, _: Sequence[str]) -> UnisonoError | None:
        """Return the error that the ranks have agreed on in the optimizer's step, with these names of parameters."""
        return None

    # Gradients

    def set_aside(self, index: int, average: torch.Tensor | None) -> None:
        """Keep the average of an earlier pass, which other ranks add theirs to: it stays if none has samples. One that
        the loss of an empty batch has made NaN is lost."""
        if average is not None and lies_in(average, self.memory.views[index]) and average.isfinite().all():
            self._averages[index] = average

    def place_gradient(self, index: int, gradient: torch.Tensor, weight: float) -> torch.Tensor:
        """Write a gradient that is ready to its buckets, times the weight that it will most likely have: it is in the
        caches, and its memory is free for the next one. Return it there."""
        self.placed[index] = weight
        with torch.no_grad():
            return torch.mul(gradient, weight, out=self.memory.views[index])

    def weight_of_ready(self, operations: Set[Operation]) -> float | None:
        """Return the weight with which gradients are placed when they are ready, for a program with these operations;
        None where they wait for `pack`: on a device, as integers, and where each part has a weight of its own."""
        if self.memory.copies is not None or self._exact is not None or self.memory.parts.groups:
            return None
        if PACK_SUM in operations:
            return 1.0
        return self.message.expected_weight if PACK in operations else None

    def agree(self, world: World) -> None:
        message = self.message
        encoded = encode(message, world.rank, world.size)
        weights = [0.0] * world.size if self.memory.parts.groups else []
        if weights:
            weights[world.rank] = 1.0 if message.samples is None else message.samples
        sums = world.allreduce(torch.tensor([*encoded, *weights], dtype=torch.float64, device="cpu")).tolist()
        result, self._loss_weights = decode(sums[: len(encoded)]), sums[len(encoded) :]
        if result.changes_differ:
            result = replace(result, difference=self._compare_weights(world))
        self.weight, self._samples = result.weight_of(message), result.samples
        if result.error() is not None:
            self.discard()
        message.result = result

    def _compare_weights(self, world: World) -> str:
        """Return the error of all ranks where the weights that they all have differ; empty where they do not."""
        common = [weights for index, weights in enumerate(self.memory.parameters) if self.memory.parts.of(index) == 1]
        table = torch.zeros(world.size, 3, dtype=torch.float64, device="cpu")
        changes = self.message.changes
        if changes is not None:
            same = (
                digest(common) if common or changes or not self.memory.parts.groups else -1
            )  # others may have changed parts
            table[world.rank] = torch.tensor([1.0, changes, same], dtype=torch.float64, device="cpu")
        world.allreduce(table)
        counts = [int(count) if compared else None for compared, count, _ in table.tolist()]
        return difference_of(counts, table[:, 2].long().tolist())

    def terms(self, scaled: bool = True) -> Terms:
        """Return the gradients of this rank's shares, each with its weight in the sum of all ranks."""
        if not self._virtual:
            return [(self.weight if scaled else 1.0, self.gradients)]
        shares = (*self._shares, (self._samples_of_pass, self.gradients))
        return [(samples / self._samples if scaled else 1.0, gradients) for samples, gradients in shares if samples]

    def measure(self, key: int, scaled: bool = True) -> None:
        assert self._exact is not None, "a program that measures has exact sums"
        with self.memory.outgoing(key):
            for index in self.memory.place(key).parameters:
                gradient = self.gradients[index]
                if gradient is not None and lies_in(gradient, self.memory.views[index]):
                    self.gradients[index] = gradient.clone()  # integers take its place
            self._exact.measure(key, self.terms(scaled))

    def pack(self, key: int, scaled: bool = True) -> None:
        """Write gradients, times this rank's weight if `scaled`, into a bucket; release those of which all parts are
        packed."""
        place, weight = self.memory.place(key), self.weight if scaled else 1.0
        if place.parts > 1:
            weight = self.memory.parts.weight(self._loss_weights, self._rank, place.parts, mean=scaled)
        if self._exact is None:
            gradients, result = self.gradients, self.message.result
            nothing_counts = result is not None and not result.samples and not result.without_samples
            if self._averages and place.parts == 1 and nothing_counts:
                gradients, weight = {**self.gradients, **self._averages}, 1 / self.layout.ranks
            self.memory.pack(key, gradients, weight, self.placed)
        else:
            terms, flags = self.terms(scaled), integers(self.memory.flags(key))
            with self.memory.outgoing(key):
                self._exact.pack(key, terms)
            for position, index in enumerate(place.ends):
                flags[position] = any(gradients[index] is not None for _, gradients in terms)
        for index in place.parameters:
            self._unpacked_parts[index] -= 1
            if not self._unpacked_parts[index]:
                for gradients in (self.gradients, *(kept for _, kept in self._shares)):
                    gradients[index] = None

    def set_grads(self, key: int) -> None:
        """Make a bucket's sums the gradients of its parameters. A parameter without a gradient on any rank gets None.

        A parameter that is cut gets its gradient with its last part; on several communicators that is any of them.
        """
        present = self.memory.present(key)
        if self._exact is not None:
            self._exact.decode(key, 0, len(self.sums(key)))
        self.memory.unpack(key)
        views, parameters = self.memory.views, self.memory.parameters
        with self.lock:
            self._has_gradient.update(present)
            for index in self.memory.place(key).parameters:
                self._unset_parts[index] -= 1
                if not self._unset_parts[index] and not self.discarded:
                    own = views[index].detach()  # not the view: `.grad.data = ...` turns it to other memory
                    parameters[index].grad = own if self._has_gradient[index] else None

    def sum_squares(self, world: World) -> None:
        parts, parameters = self.memory.parts, self.memory.parameters
        with self.memory.incoming():
            gradients = ((parameter.grad, parts.of(index)) for index, parameter in enumerate(parameters))
            self._norm = norm_of_all(gradients, world)

    def clip(self) -> None:
        with self.memory.incoming():
            self._clip([parameter.grad for parameter in self.memory.parameters if parameter.grad is not None])

    def clip_local(self) -> None:
        with self.memory.incoming(marked=True):
            self._clip([gradient for gradient in self.gradients.values() if gradient is not None])

    def _clip(self, gradients: list[torch.Tensor]) -> None:
        assert self.layout.clip is not None, "a program without clip has no clip task"
        norm = torch.nn.utils.get_total_norm(gradients) if self._norm is None else self._norm
        factor = torch.clamp(self.layout.clip / (norm + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(factor)

    def update(self, parameters: Sequence[int], world: World | None = None) -> None:
        """Make the optimizer's step for these parameters, with norms of layers that are summed over a world."""
        assert self._update is not None, "a program with updates has an optimizer"
        with self.memory.incoming():
            memory = self.memory
            sums = None if world is None else partial(memory.parts.sum_norms, memory.parameters, world)
            self._update(parameters, sums)

    def update_local(self, parameters: Sequence[int]) -> None:
        with self.memory.incoming(marked=True) as stream:
            with self.lock:
                for index in () if self.discarded else parameters:
                    gradient, self.gradients[index] = self.gradients[index], None
                    self.memory.parameters[index].grad = gradient
                    if stream is not None and gradient is not None:
                        gradient.record_stream(stream)  # it may be freed before it was read
            self.update(parameters)

    # Buffers

    def copy_buffers(self) -> None:
        """Copy the model's buffers to the memory they are sent from."""
        with self.memory.incoming(marked=True):
            self._buffers.pack()

    def pack_buffers(self) -> None:
        self.buffers_pending = True
        self.copy_buffers()

    def buffers(self) -> torch.Tensor:
        return self._buffers.flat


class ShardedReplica(ModelReplica):
    """Replica that the tasks of `rules/sharded.py` act on: by shards. They update by `step`; None: the program has made
    none."""

    def __init__(self, programs: Programs, layout: Layout, message: ControlMessage, step: ShardedStep | None) -> None:
        super().__init__(programs, layout, message)
        memory, rank = self.memory, self._rank
        segments = {key: memory.segments(key, layout.group_of(key, rank), rank) for key in layout.keys}
        beside = partial(memory.incoming, marked=True)
        self.shards = ShardWork(layout, segments, self.sums, memory.segment_weights, step, beside)
        self.uses: Mapping[int, GradientUse] | None = None
        """Changes of gradients by the program before its step; None where it has left the step out."""
        self._result: StepResult | None = None  # of all ranks of a loop of their own; None until it is known

    def has_gradient(self, index: int) -> bool:
        """Return True where any rank had a gradient of a parameter. Its bucket has been summed."""
        keys = self.layout.keys_of[index]
        return bool(keys) and self.shards.present(keys[0])[index]

    def step_error(self, names: Sequence[str]) -> UnisonoError | None:
        """Return the error of a step that only some ranks have made, or of other gradients than those summed."""
        return None if self._result is None else self._result.error(names)

    def pack(self, key: int, scaled: bool = True) -> None:
        """Write gradients into a bucket, and record which there are."""
        kept = {index: gradient for _, kept in self._shares for index, gradient in kept.items() if gradient is not None}
        self.shards.set_presence(key, self.gradients | kept)
        super().pack(key, scaled)

    def agree_on_step(self, world: Any) -> None:
        """Sum the messages of all ranks. Nothing is updated where not all have made the step."""
        numbers = step_numbers(self.uses, self.layout.parameters, self._rank, self.layout.ranks)
        total = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        world.allreduce(total)
        self._result = step_result(total.tolist(), self.layout.parameters, self.layout.ranks)
        if not self._result.is_made():
            self.shards.step = None
        self.shards.remove(self._result.removed)

    def update_shard(self, key: int) -> None:
        """Replace the gradients in this rank's shard of a bucket by updated weights."""
        if self.discarded:
            self.shards.step = None
        self.shards.update(key)

    def unpack_shards(self, key: int) -> None:
        """Copy a bucket of gathered weights to its parameters.

        Where this rank's program has left out the optimizer's step, it may be in the backward pass of the next one,
        which takes no notice of the copy.
        """
        with self.lock:
            if self.discarded:
                return
        unnoticed = () if self.shards.step is not None else self.layout.bucket(key).parameters
        with _unsafe_preserve_version_counter(tuple(self.memory.parameters[index] for index in unnoticed)):
            self.write_weights(key, self.bucket(key))
