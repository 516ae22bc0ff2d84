"""Backward pass of a model: gradients that become ready end the outside tasks of the step program.

    mark_ready 3, 2   │ mark_ready 1 │ ... │ end        in the thread of the backward pass
    advance           │ advance      │     │ advance    there too, or in the main thread
    pack, allreduce, set_grads, update ...              tasks that follow, which act on the pass's replica

Buckets are sent in the order of the program, the same on all ranks, whichever fills first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import SimpleQueue
from threading import Lock

import torch

from unisono.errors import UnisonoError, UsageError
from unisono.reducer.accumulation import Accumulation
from unisono.reducer.bucket_memory import BucketMemory, norm_of_all
from unisono.reducer.buffers import Buffers
from unisono.reducer.control import Agreement, decode, difference_of, encode
from unisono.reducer.programs import Programs
from unisono.reducer.scattered_gradient import ScatteredGradient
from unisono.reducer.structure import digest
from unisono.reducer.weight_first import forget_unread, have_been_read
from unisono.rules.sharded import STEP
from unisono.step import operations as op
from unisono.step.layout import Layout, Updates
from unisono.step.play import Cursor, Prepared
from unisono.step.program import Task
from unisono.step.replica import RuleMemory
from unisono.world import World

Update = Callable[[Sequence[int]], None]
"""Optimizer's step for these parameters, given by number."""


class ModelReplica:
    """Gradients of one pass on one rank, and the work of its tasks."""

    def __init__(
        self,
        memory: BucketMemory,
        buffers: Buffers,
        layout: Layout,
        agreement: Agreement,
        update: Update | None = None,
        kept: RuleMemory | None = None,
    ) -> None:
        self.memory, self.layout, self.agreement = memory, layout, agreement
        self.kept = RuleMemory() if kept is None else kept
        """Tensors that the rule keeps between steps."""
        self._buffers, self._update = buffers, update
        self.gradients: dict[int, torch.Tensor | None] = {}
        """Gradient of each parameter that is ready; None where there is none."""
        self.weight = 1.0
        """Factor of the gradients before they are summed; known once all ranks' samples are."""
        self.discarded = False
        """True once the pass has failed: it has no further effect."""
        self.buffers_pending = False
        """True while rank 0's buffers are being sent, or have arrived and were not copied to the model."""
        self.lock = Lock()
        """Lock held while the pass is discarded, and while gradients are set."""
        self._loss_weights: Sequence[float] = ()  # of all ranks, where parameters are split
        self._rank = 0
        self._unpacked_parts = [len(keys) for keys in layout.keys_of]
        self._unset_parts = list(self._unpacked_parts)
        self._has_gradient: dict[int, bool] = {}
        self._norm: torch.Tensor | None = None  # of all ranks' gradients, where parameters are split
        self.bucket, self.arrivals, self.sums, self.flags = memory.bucket, memory.arrivals, memory.sums, memory.flags
        self.fill_bucket, self.read_weights = memory.fill_bucket, memory.read_weights
        self.write_weights, self.unpack_weights = memory.write_weights, memory.unpack_weights

    def discard(self) -> None:
        """Discard the pass: running tasks set no gradient from here on."""
        with self.lock:
            self.discarded = True

    def step_error(self, _: Sequence[str]) -> UnisonoError | None:
        """Return the error that the ranks have agreed on in the optimizer's step, with these names of parameters."""
        return None

    def agree(self, world: World) -> None:
        message = self.agreement.message
        own = encode(message, world.rank, world.size)
        weights = [0.0] * world.size if self.memory.parts.groups else []
        if weights:
            weights[world.rank] = 1.0 if message.samples is None else message.samples
        total = torch.tensor([*own, *weights], dtype=torch.float64)
        world.allreduce(total)
        sums = total.tolist()
        result = decode(sums[: len(own)])
        self._loss_weights, self._rank = sums[len(own) :], world.rank
        if result.changes_differ:
            result = replace(result, difference=self._compare_weights(world))
        self.weight = result.weight_of(message)
        if result.error() is not None:
            self.discard()
        self.agreement.result = result

    def _compare_weights(self, world: World) -> str:
        """Return the error of all ranks where the weights that they all have differ; empty where they do not."""
        whole = [one for number, one in enumerate(self.memory.parameters) if self.memory.parts.of(number) == 1]
        table = torch.zeros(world.size, 3, dtype=torch.float64)
        changes = self.agreement.message.changes
        if changes is not None:
            table[world.rank] = torch.tensor([1.0, changes, digest(whole)], dtype=torch.float64)
        world.allreduce(table)
        counts = [int(count) if compared else None for compared, count, _ in table.tolist()]
        return difference_of(counts, [int(number) for number in table[:, 2].tolist()])

    def pack(self, key: int, scaled: bool = True) -> None:
        """Write gradients, times this rank's weight if `scaled`, into a bucket; release those of which all parts are
        packed."""
        place = self.memory.place(key)
        if place.parts > 1:
            weight = self.memory.parts.weight(self._loss_weights, self._rank, place.parts, mean=scaled)
        else:
            weight = self.weight if scaled else 1.0
        self.memory.pack(key, self.gradients, weight)
        for number in place.parameters:
            self._unpacked_parts[number] -= 1
            if not self._unpacked_parts[number]:
                self.gradients[number] = None

    def set_grads(self, key: int) -> None:
        """Make a bucket's sums the gradients of its parameters. A parameter without a gradient on any rank gets None.

        A parameter that is cut gets its gradient with its last part; on several communicators that is any of them.
        """
        present = self.memory.present(key)
        self.memory.unpack(key)
        with self.lock:
            self._has_gradient.update(present)
            for number in self.memory.place(key).parameters:
                self._unset_parts[number] -= 1
                if not self._unset_parts[number] and not self.discarded:
                    view = self.memory.views[number] if self._has_gradient[number] else None
                    self.memory.parameters[number].grad = view

    def sum_squares(self, world: World) -> None:
        parts = self.memory.parts
        with self.memory.incoming():
            self._norm = norm_of_all(((one.grad, parts.of(at)) for at, one in enumerate(self.memory.parameters)), world)

    def clip(self) -> None:
        with self.memory.incoming():
            self._clip([one.grad for one in self.memory.parameters if one.grad is not None])

    def clip_local(self) -> None:
        with self.memory.incoming(marked=True):
            self._clip([one for one in self.gradients.values() if one is not None])

    def _clip(self, gradients: list[torch.Tensor]) -> None:
        assert self.layout.clip is not None, "a program without clip has no clip task"
        norm = torch.nn.utils.get_total_norm(gradients) if self._norm is None else self._norm
        factor = torch.clamp(self.layout.clip / (norm + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(factor)

    def update(self, parameters: Sequence[int]) -> None:
        assert self._update is not None, "a program with updates has an optimizer"
        with self.memory.incoming():
            self._update(parameters)

    def update_local(self, parameters: Sequence[int]) -> None:
        with self.memory.incoming(marked=True) as stream:
            with self.lock:
                for number in () if self.discarded else parameters:
                    gradient, self.gradients[number] = self.gradients[number], None
                    self.memory.parameters[number].grad = gradient
                    if stream is not None and gradient is not None:
                        gradient.record_stream(stream)  # it may be freed before it was read
            self.update(parameters)

    def pack_weights(self, key: int, ranks: int) -> None:
        self.memory.pack_weights(key, ranks)

    def pack_buffers(self) -> None:
        self.buffers_pending = True
        with self.memory.incoming(marked=True):
            self._buffers.pack()

    def buffers(self) -> torch.Tensor:
        return self._buffers.flat


class BackwardPass:
    """Pass that has begun, and its place in the step program. `replica` is what the program's tasks act on."""

    def __init__(
        self,
        replica: ModelReplica,
        program: Prepared,
        programs: Programs,
        accumulation: Accumulation,
        arrivals: SimpleQueue[bool] | None = None,
    ) -> None:
        """Begin a pass. With `arrivals`, who gets True from there has to `advance` it: the main thread, where it has to
        run collectives itself while the pass runs in another thread."""
        self.replica, self._accumulation, self._arrivals = replica, accumulation, arrivals
        self._times, self._by_main, self._parameters = programs.times, programs.by_main, replica.memory.parameters
        self._cursor = Cursor(program, programs.player, replica)
        self._sums, differs, layout = programs.traits.sums, programs.traits.state.differs, replica.layout
        self._contributes = replica.agreement.message.contributes
        self._takes = self._contributes or differs
        self._releases = not (differs and layout.updates is Updates.OUTSIDE)
        self.ended = False
        """True once the backward pass has ended."""
        self.order: list[int] = []
        """Parameters in the order in which their gradients became ready."""
        self._missing_gradients = [0, *(len(one.parameters) for one in layout.buckets)]
        self._postponed: list[int] = []  # ready, but added only after the program's own hooks have run
        self._submitted: set[int] = set()  # keys of buckets that were packed or applied

    def mark_ready(self, number: int, complete: bool) -> None:
        """Add a parameter's gradient, after those that have waited. It waits too unless it is `complete`: hooks of the
        program may still change it."""
        if self._postponed:
            self._add_postponed()
        if complete:
            self._take(number)
        else:
            self._postponed.append(number)

    def end(self) -> None:
        """End the backward pass: parameters without a gradient get none."""
        self._add_postponed()
        for number in range(len(self._parameters)):
            if number not in self.replica.gradients:
                self._take(number, there=False)
        self.ended = True
        forget_unread(self._parameters)
        self._on_progress()

    def advance(self) -> None:
        """End each finished task of the outside program, which starts the tasks that follow it."""
        while (task := self._cursor.outside) is not None and self._has_ended(task):
            self._cursor.end(self.mark_submitted)

    @property
    def awaits_step(self) -> bool:
        """True where the program waits for the step of the user's optimizer."""
        task = self._cursor.outside
        return task is not None and task.operation in (op.STEP_LOCAL, STEP)

    def end_step(self) -> None:
        """Run the tasks that follow the step of the user's optimizer."""
        self.replica.memory.mark()
        self._cursor.end(lambda _: None)

    def add(self, number: int, gradient: torch.Tensor | None) -> None:
        """Add a parameter's gradient. A second one (of another part of the backward pass) is added to the first.

        Raises UsageError when the first was already submitted.
        """
        keys, gradients = self.replica.layout.keys_of[number], self.replica.gradients
        if number in gradients:
            before = gradients[number]
            if not self._submitted.isdisjoint(keys):
                raise UsageError(
                    f"parameter {number} got a gradient twice in one backward pass, the first is already submitted: "
                    "activation checkpointing needs use_reentrant=False"
                )
            gradients[number] = gradient if before is None or gradient is None else before + gradient
            return
        gradients[number] = gradient
        self.order.append(number)
        for key in keys:
            self._missing_gradients[key] -= 1
            if not self._missing_gradients[key]:
                self.replica.memory.mark(key)

    def is_full(self, key: int) -> bool:
        """Return True where all gradients of a bucket are ready. Key 0: a pass begins with its first gradient."""
        return not self._missing_gradients[key]

    def mark_submitted(self, task: Task) -> None:
        """Record that a task is about to run: a bucket that is packed, or applied, counts as submitted."""
        if task.operation in (op.PACK, op.PACK_SUM):
            self._submitted.add(task.key)
        elif task.operation is op.UPDATE_LOCAL:
            self._submitted.update(key for number in task.parameters for key in self.replica.layout.keys_of[number])

    def _add_postponed(self) -> None:
        """Add the gradients that waited for the program's own hooks, which have run by now."""
        for number in self._postponed:
            self._take(number)
        self._postponed.clear()

    def _take(self, number: int, there: bool = True) -> None:
        """Take a gradient from its parameter, and add it where it counts."""
        parameter = self._parameters[number]
        if there:
            self._times.record_ready(number)
        gradient = parameter.grad
        part = self.replica.memory.parts.of(number) > 1  # its gradient is of the group's samples, whatever this rank's
        share = self._sums and self._accumulation.take_share(number, self._contributes or part)
        if isinstance(gradient, ScatteredGradient):  # of an earlier pass: it stays, and the program cannot step with it
            gradient = gradient.take_added()
        elif self._releases:
            parameter.grad = None  # before it is added: an update may set another at once
        self.add(number, gradient if self._takes or share or part else None)
        self._on_progress()

    def _on_progress(self) -> None:
        """Advance the program. The main thread does so where it has to run collectives itself."""
        if self._arrivals is not None:
            self._arrivals.put(True)
            return
        began = time.perf_counter()
        self.advance()
        if self._by_main:
            self._times.add_waiting(began)

    def _has_ended(self, task: Task) -> bool:
        """Return True where a task of the outside program has ended in a pass that has begun."""
        if task.operation is op.BACKWARD:
            return self.is_full(task.key)
        if task.operation is op.GRAD_INPUT:
            return have_been_read(self._parameters[number] for number in task.parameters)
        if task.operation is op.END:
            return self.ended
        return task.operation in (op.BEGIN, op.FORWARD)
