"""Backward passes of a model, one after another: gradients that become ready end the outside tasks of the step program.

    mark_ready 3, 2   │ mark_ready 1 │ ... │ end        in the thread of the backward pass
    advance           │ advance      │     │ advance    there too, or in the main thread
    pack, allreduce, set_grads, update ...              tasks that follow, which act on the pass's replica

The outside program runs in one thread, so its tasks end in program order. The tasks that follow one of them are played
when it has ended, and the next one waits for the values that it reads (its gate). Buckets are sent in the order of the
program, the same on all ranks, whichever fills first.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch

from unisono.engine import OperationSpan
from unisono.errors import OperationError, UsageError
from unisono.reducer.accumulation import Accumulation
from unisono.reducer.control import StepControl
from unisono.reducer.programs import Programs
from unisono.reducer.replica import ModelReplica
from unisono.reducer.scattered_gradient import ScatteredGradient
from unisono.reducer.weight_first import forget_unread, have_been_read
from unisono.rules.easgd import header
from unisono.rules.sharded import STEP
from unisono.step import operations as op
from unisono.step.build import BUFFERS
from unisono.step.play import Prepared
from unisono.step.program import Task, weights

TAKING = (*op.PACKING, op.UPDATE_LOCAL)
"""Operations that take gradients from their parameters; without any of them, they stay there."""


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
        self._times, self._parameters = programs.times, replica.memory.parameters
        self._by_main = programs.overlap.by_main
        self._program, self._player, self._next = program, programs.player, 0
        self._sums, layout = programs.traits.sums, replica.layout
        message = replica.message
        self._contributes = message.contributes
        self._takes = message.contributes or (programs.traits.state.differs and message.samples is None)
        operations = {prepared.task.operation for prepared in program}
        self.releases = not operations.isdisjoint(TAKING)
        """True where gradients leave their parameters, which get others in their place."""
        self._weight = replica.weight_of_ready(operations)
        self.ended = False
        """True once the backward pass has ended."""
        self.order: list[int] = []
        """Parameters in the order in which their gradients became ready."""
        self._missing_gradients = [0, *(len(bucket.parameters) for bucket in layout.buckets)]
        self._postponed: list[int] = []  # ready, but added only after the program's own hooks have run
        self._submitted: set[int] = set()  # keys of buckets that were packed or applied

    def mark_ready(self, index: int, complete: bool) -> None:
        """Add a parameter's gradient, after those that have waited. It waits too unless it is `complete`: hooks of the
        program may still change it."""
        if index in self._postponed:  # of another reentrant checkpoint: `.grad` is the sum of both, and waits
            return
        self._add_postponed()
        if complete:
            self._take(index)
        else:
            self._postponed.append(index)

    def end(self) -> None:
        """End the backward pass: parameters without a gradient get none."""
        self._add_postponed()
        for index in range(len(self._parameters)):
            if index not in self.replica.gradients:
                self._take(index, present=False)
        self.ended = True
        forget_unread(self._parameters)
        self._on_progress()

    def advance(self) -> None:
        """End each finished task of the outside program, and play the tasks that follow it."""
        while (task := self._outside) is not None and self._has_ended(task):
            self._play_next()

    @property
    def awaits_step(self) -> bool:
        """True where the program waits for the step of the user's optimizer."""
        task = self._outside
        return task is not None and task.operation in (op.STEP_LOCAL, STEP)

    def end_step(self) -> None:
        """Run the tasks that follow the step of the user's optimizer."""
        self.replica.memory.record_progress()
        self._play_next()

    @property
    def _outside(self) -> Task | None:
        """Task of the outside program that has to end next; None where the program has no more."""
        return self._program[self._next].task if self._next < len(self._program) else None

    def _play_next(self) -> None:
        """End the outside program's task, and play those up to its next one."""
        self._next += 1
        while (task := self._outside) is not None and task.operation.act is not None:
            self.mark_submitted(task)
            self._next += 1
            self._player.play(self._program[self._next - 1], self.replica)

    def add(self, index: int, gradient: torch.Tensor | None) -> None:
        """Add a parameter's gradient. A second one (of another part of the backward pass) is added to the first.

        Raises UsageError when the first was already submitted.
        """
        keys, gradients = self.replica.layout.keys_of[index], self.replica.gradients
        if index in gradients:
            before = gradients[index]
            if not self._submitted.isdisjoint(keys):
                raise UsageError(
                    f"parameter {index} got a gradient twice in one backward pass, the first is already submitted: "
                    "activation checkpointing needs use_reentrant=False"
                )
            if index in self.replica.placed and before is not None and gradient is not None:
                before.add_(gradient.detach(), alpha=self.replica.placed[index])
            else:
                gradients[index] = gradient if before is None or gradient is None else before + gradient
            return
        if gradient is not None and self._weight is not None:
            gradient = self.replica.place_gradient(index, gradient, self._weight)
        gradients[index] = gradient
        self.order.append(index)
        for key in keys:
            self._missing_gradients[key] -= 1
            if not self._missing_gradients[key]:
                self.replica.memory.record_progress(key)

    def is_full(self, key: int) -> bool:
        """Return True where all gradients of a bucket are ready. Key 0: a pass begins with its first gradient."""
        return not self._missing_gradients[key]

    def mark_submitted(self, task: Task) -> None:
        """Record that a task is about to run: a bucket that is packed, or applied, counts as submitted."""
        if task.operation in op.PACKING:
            self._submitted.add(task.key)
        elif task.operation is op.UPDATE_LOCAL:
            self._submitted.update(key for index in task.parameters for key in self.replica.layout.keys_of[index])

    def _add_postponed(self) -> None:
        """Add the gradients that waited for the program's own hooks, which have run by now."""
        for index in self._postponed:
            self._take(index)
        self._postponed.clear()

    def _take(self, index: int, present: bool = True) -> None:
        """Take a gradient from its parameter, and add it where it counts."""
        parameter = self._parameters[index]
        if present:
            self._times.record_ready(index)
        gradient = parameter.grad
        part = self.replica.memory.parts.of(index) > 1  # its gradient is of the group's samples, whatever this rank's
        share = self._sums and self._accumulation.take_share(index, self._contributes or part)
        counts = self._takes or share or part
        if isinstance(gradient, ScatteredGradient):  # of an earlier pass: it stays, and the program cannot step with it
            gradient = gradient.take_added()
        elif self.releases or not self._takes:  # without samples it does not count, and nothing takes its place
            parameter.grad = None  # before it is added: an update may set another at once
            if not counts:
                self.replica.set_aside(index, gradient)
        self.add(index, gradient if counts else None)
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
            return have_been_read(self._parameters[index] for index in task.parameters)
        if task.operation is op.END:
            return self.ended
        return task.operation in (op.BEGIN, op.FORWARD)


class PassRunner:
    """Runner of one backward pass after another, and waits for what they have begun, whose time is counted."""

    def __init__(self, programs: Programs, control: StepControl, names: Sequence[str] = ()) -> None:
        self._programs, self._times, self._control, self._names = programs, programs.times, control, names
        self._indices = {id(parameter): index for index, parameter in enumerate(programs.memory.parameters)}
        self.current: BackwardPass | None = None
        """Pass that has begun, until its last event has advanced the program."""
        self.last: BackwardPass | None = None
        """Pass that began last, also when it has ended; None before the first one, and after one that has failed."""
        self._unpacking = threading.RLock()
        self.arrivals: SimpleQueue[bool] | None = None
        """Queue that wakes the main thread when a gradient is ready; None where no other thread runs a pass."""

    def end_backward(self) -> BackwardPass:
        begun = self.current
        assert begun is not None, "a pass has begun"
        begun.end()
        if self.arrivals is None:
            self.current = None
        return begun

    def run_beside_main(self, backward: Callable[[], None]) -> None:
        """Run `backward`, which begins and ends a pass, in another thread, while this one runs its own tasks."""
        arrivals = self.arrivals = SimpleQueue()
        ended: list[float] = []
        threads = torch.get_num_threads()

        def carry_out() -> None:
            if torch.get_num_threads() != threads:  # each thread has a number of its own, and products depend on it
                torch.set_num_threads(threads)
            try:
                backward()
            finally:
                ended.append(time.perf_counter())
                arrivals.put(False)

        try:
            engine, observe = self._programs.player.engine, self._programs.observe
            handle = engine.push(carry_out, (), (), "computing", "backward", observe=observe)
            while arrivals.get():
                assert self.current is not None, "a pass has begun"
                self.current.advance()
            handle.wait()
            self._times.add_waiting(ended[0])
            self.current = None
        finally:
            self.arrivals = None

    @property
    def awaits_step(self) -> bool:
        """True where the program waits for the step of the user's optimizer."""
        return self.last is not None and self.last.awaits_step

    def finish_step(self) -> None:
        """Run the tasks that follow the step of the user's optimizer, which has been made or left out, if the program
        waits for it.

        They average the weights, if the rule does so after this step, or update and gather shards. Raises the error
        that the ranks agree on: MismatchError for a step in shards that only some have made.
        """
        last = self.last
        if last is None or not last.awaits_step:
            return
        last.end_step()
        self.wait()
        if (error := last.replica.step_error(self._names)) is not None:
            raise error

    def discard(self, begun: BackwardPass | None) -> bool:
        """Discard a pass that has failed: nothing of it that is still running may set a gradient. Without a pass, none
        had begun. Return True where no later pass has begun."""
        newest = begun is None or begun is self.current
        if newest:
            self.current = self.last = None
            forget_unread(self._programs.memory.parameters)
        if begun is not None:
            begun.replica.discard()
        return newest

    def wait(self) -> None:
        """Wait until everything that was begun is finished, except exchanges that run beside later steps. Raises
        OperationError when any of it has failed, and the error of the control message."""
        began = time.perf_counter()
        self._programs.player.wait()
        self._programs.memory.join()
        self._programs.memory.record_progress()
        self._times.add_waiting(began)
        self.wait_for_buffers()
        self._control.check()

    def wait_for_all(self) -> None:
        """Wait until everything is finished, also exchanges that run beside later steps."""
        self.wait()
        self._programs.player.wait_over_steps()

    def wait_for(self, parameter: torch.Tensor) -> None:
        """Wait until a parameter is up to date, before its module's forward pass reads it."""
        index = self._indices.get(id(parameter))
        if index is None or self.current is not None:
            return
        began = time.perf_counter()
        waited = self._programs.player.wait_for(weights(index))
        self._programs.memory.join()
        if waited:
            self._times.add_waiting(began)
            thread, now = threading.current_thread().name, time.perf_counter()
            self._programs.observe(OperationSpan("wait for weights", "waiting", thread, began, now))
        self._times.record_read(index)

    def wait_for_replies(self) -> None:
        """Wait until all servers have replied to this step's exchange; their centre may still be on its way."""
        self._programs.player.wait(*map(header, range(self._programs.communicators)))

    def wait_for_buffers(self, _: object = None) -> None:
        """Wait until rank 0's buffers have arrived, and copy them to this rank's, before it reads or updates one."""
        if (last := self.last) is None or not last.replica.buffers_pending or self.current is not None:
            return
        replica, began = last.replica, time.perf_counter()
        with self._unpacking:  # a thread that reads the model beside the training waits, and copies nothing again
            if not replica.buffers_pending:
                return
            try:
                self._programs.player.wait(BUFFERS)
            except OperationError:  # they will not come
                replica.buffers_pending = False
                raise
            self._times.add_waiting(began)
            if not replica.discarded and self._programs.collectives.rank:
                self._programs.buffers.unpack()
            replica.buffers_pending = False

    def finish(self) -> None:
        """Wait for everything before the program ends or memory is freed; print an error of it to stderr."""
        try:
            self.wait_for_all()
        except (OperationError, UsageError) as error:
            print(f"unisono: the last step has failed: {error}", file=sys.stderr, flush=True)
