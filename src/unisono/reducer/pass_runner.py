"""Runner of a model's backward passes: gradients that become ready end the outside tasks of the step program.

mark_ready 3, 2   │ mark_ready 1 │ ... │ end_backward        in the thread of the backward pass
advance           │ advance      │     │ advance             there too, or in the main thread
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch

from unisono.engine.spans import OperationSpan
from unisono.errors import OperationError, UsageError
from unisono.reducer.accumulation import Accumulation
from unisono.reducer.backward_pass import BackwardPass
from unisono.reducer.buffers import Buffers
from unisono.reducer.control import StepControl
from unisono.reducer.programs import Programs
from unisono.reducer.scattered_gradient import ScatteredGradient
from unisono.reducer.weight_first import forget_unread, have_been_read
from unisono.rules.easgd import header
from unisono.rules.sharded import STEP
from unisono.step import operations as op
from unisono.step.build import BUFFERS
from unisono.step.layout import Updates
from unisono.step.play import Cursor, Prepared
from unisono.step.program import Task, weights


class PassRunner:
    """Runner of one backward pass after another, and waits for the work that they have begun: exchanges, updates and
    buffers. The time of each wait is counted."""

    def __init__(
        self,
        programs: Programs,
        buffers: Buffers,
        accumulation: Accumulation,
        control: StepControl,
        names: Sequence[str] = (),
    ) -> None:
        self._programs, self._buffers, self._accumulation, self._control = programs, buffers, accumulation, control
        self._times, self._observe, self._names = programs.times, programs.observe, names
        self.parameters = programs.memory.parameters
        self._numbers = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        self.current: BackwardPass | None = None
        """Pass that has begun, until its last event has advanced the program."""
        self.last: BackwardPass | None = None
        """Pass that began last, also when it has ended; None before the first one, and after one that has failed."""
        self._cursor: Cursor | None = None  # of the last pass
        self._contributes = self._takes = self._releases = self._by_main = False  # of the last pass
        self._postponed: list[int] = []  # ready, but added only after the program's own hooks have run
        self._arrivals: SimpleQueue[bool] | None = None  # wakes the main thread when a gradient is ready

    def begin(self, begun: BackwardPass, program: Prepared, differs: bool) -> None:
        """Begin a pass of a rule under which the ranks' weights differ, or not."""
        self.current = self.last = begun
        self._cursor = Cursor(program, self._programs.player, begun)
        self._by_main = self._programs.by_main
        self._contributes = begun.control_message.contributes
        self._takes = self._contributes or differs
        self._releases = not (differs and begun.layout.updates is Updates.OUTSIDE)

    def mark_ready(self, number: int, complete: bool) -> None:
        """Add a parameter's gradient, after those that have waited. It waits too unless it is `complete`: hooks of the
        program may still change it."""
        self._add_postponed()
        if complete:
            self._add(number)
        else:
            self._postponed.append(number)

    def end_backward(self) -> BackwardPass:
        """End the backward pass, and return it: parameters without a gradient get none."""
        begun = self.current
        assert begun is not None, "a pass has begun"
        self._add_postponed()
        for number in range(len(self.parameters)):
            if number not in begun.gradients:
                self._add(number, there=False)
        begun.ended = True
        forget_unread(self.parameters)
        self._on_progress()
        if self._arrivals is None:
            self.current = None
        return begun

    def run_beside_main(self, backward: Callable[[], None]) -> None:
        """Run `backward`, which begins and ends a pass, in another thread, while this one runs its own tasks."""
        arrivals = self._arrivals = SimpleQueue()
        ended: list[float] = []

        def carry_out() -> None:
            try:
                backward()
            finally:
                ended.append(time.perf_counter())
                arrivals.put(False)

        try:
            handle = self._programs.player.engine.push(
                carry_out, (), (), "computing", "backward", observe=self._observe
            )
            while arrivals.get():
                self._advance()
            handle.wait()
            self._times.add_waiting(ended[0])
            self.current = None
        finally:
            self._arrivals = None

    @property
    def awaits_step(self) -> bool:
        """True where the program waits for the step of the user's optimizer."""
        task = None if self._cursor is None else self._cursor.outside
        return task is not None and task.operation in (op.STEP_LOCAL, STEP)

    def finish_step(self) -> None:
        """Run the tasks that follow the step of the user's optimizer, which has been made or left out, if the program
        waits for it.

        They average the weights, if the rule does so after this step, or update and gather shards. Raises the error
        that the ranks agree on: MismatchError for a step in shards that only some have made.
        """
        last = self.last
        if not self.awaits_step:
            return
        assert self._cursor is not None and last is not None, "a pass has begun"
        self._cursor.end(lambda _: None)
        self.wait()
        if (error := last.step_error(self._names)) is not None:
            raise error

    def discard(self, begun: BackwardPass | None) -> bool:
        """Discard a pass that has failed: nothing of it that is still running may set a gradient. Without a pass, none
        had begun. Return True where no later pass has begun."""
        newest = begun is None or begun is self.current
        if newest:
            self.current = self.last = self._cursor = None
            self._postponed.clear()
            forget_unread(self.parameters)
        if begun is not None:
            begun.discard()
        return newest

    def wait(self) -> None:
        """Wait until everything that was begun is finished, except exchanges that run beside later steps. Raises
        OperationError when any of it has failed, and the error of the control message."""
        began = time.perf_counter()
        self._programs.player.wait()
        self._times.add_waiting(began)
        self.wait_for_buffers()
        self._control.check()

    def wait_for_all(self) -> None:
        """Wait until everything is finished, also exchanges that run beside later steps."""
        self.wait()
        self._programs.player.wait_over_steps()

    def wait_for(self, parameter: torch.Tensor) -> None:
        """Wait until a parameter is up to date, before its module's forward pass reads it."""
        number = self._numbers.get(id(parameter))
        if number is None or self.current is not None:
            return
        began = time.perf_counter()
        if self._programs.player.wait_for(weights(number)):
            self._times.add_waiting(began)
            thread, now = threading.current_thread().name, time.perf_counter()
            self._observe(OperationSpan("wait for weights", "waiting", thread, began, now))
        self._times.record_read(number)

    def wait_for_replies(self) -> None:
        """Wait until all servers have replied to this step's exchange; their centre may still be on its way."""
        self._programs.player.wait(*map(header, range(self._programs.communicators)))

    def wait_for_buffers(self, _: object = None) -> None:
        """Wait until rank 0's buffers have arrived, and copy them to this rank's, before it reads or updates one."""
        last = self.last
        if last is None or not last.buffers_pending or self.current is not None:
            return
        last.buffers_pending, began = False, time.perf_counter()
        self._programs.player.wait(BUFFERS)
        self._times.add_waiting(began)
        if not last.discarded and self._programs.collectives.rank:
            self._buffers.unpack()

    def finish(self) -> None:
        """Wait for everything before the program ends or memory is freed; print an error of it to stderr."""
        try:
            self.wait_for_all()
        except (OperationError, UsageError) as error:
            print(f"unisono: the last step has failed: {error}", file=sys.stderr, flush=True)

    def _add_postponed(self) -> None:
        """Add the gradients that waited for the program's own hooks, which have run by now."""
        for number in self._postponed:
            self._add(number)
        self._postponed.clear()

    def _add(self, number: int, there: bool = True) -> None:
        begun, parameter = self.current, self.parameters[number]
        assert begun is not None, "a pass has begun"
        if there:
            self._times.record_ready(number)
        gradient = parameter.grad
        part = begun.memory.parts.of(number) > 1  # its gradient is of the group's samples, whatever this rank's
        share = self._accumulation.take_share(number, self._contributes or part)
        if isinstance(gradient, ScatteredGradient):  # of an earlier pass: it stays, and the program cannot step with it
            gradient = gradient.take_added()
        elif self._releases:
            parameter.grad = None  # before it is added: an update may set another at once
        begun.add(number, gradient if self._takes or share or part else None)
        self._on_progress()

    def _on_progress(self) -> None:
        """Advance the program. The main thread does so where it has to run collectives itself."""
        if self._arrivals is not None:
            self._arrivals.put(True)
        else:
            began = time.perf_counter()
            self._advance()
            if self._by_main:
                self._times.add_waiting(began)

    def _advance(self) -> None:
        """End each finished task of the outside program, which starts the tasks that follow it."""
        begun, cursor = self.current, self._cursor
        assert begun is not None and cursor is not None, "a pass has begun"
        while (task := cursor.outside) is not None and self._has_ended(task, begun):
            cursor.end(begun.mark_submitted)

    def _has_ended(self, task: Task, begun: BackwardPass) -> bool:
        """Return True where a task of the outside program has ended in a pass that has begun."""
        if task.operation is op.BACKWARD:
            return begun.is_full(task.key)  # key 0: a pass begins with its first gradient
        if task.operation is op.GRAD_INPUT:
            return have_been_read(self.parameters[number] for number in task.parameters)
        if task.operation is op.END:
            return begun.ended
        return task.operation in (op.BEGIN, op.FORWARD)
