"""Backward passes of a model, one after another, and waits for the exchanges, updates and buffers of each."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch

from unisono.engine.spans import OperationSpan
from unisono.errors import OperationError, UsageError
from unisono.reducer.backward_pass import BackwardPass
from unisono.reducer.buffers import Buffers
from unisono.reducer.control import StepControl
from unisono.reducer.programs import Programs
from unisono.reducer.weight_first import forget_unread
from unisono.rules.easgd import header
from unisono.step.build import BUFFERS
from unisono.step.program import weights


class PassRunner:
    """Runner of one backward pass after another. The time of each wait is counted."""

    def __init__(self, programs: Programs, buffers: Buffers, control: StepControl, names: Sequence[str] = ()) -> None:
        self._programs, self._buffers, self._control, self._names = programs, buffers, control, names
        self._times = programs.times
        self._numbers = {id(parameter): number for number, parameter in enumerate(programs.memory.parameters)}
        self.current: BackwardPass | None = None
        """Pass that has begun, until its last event has advanced the program."""
        self.last: BackwardPass | None = None
        """Pass that began last, also when it has ended; None before the first one, and after one that has failed."""
        self.arrivals: SimpleQueue[bool] | None = None
        """Queue that wakes the main thread when a gradient is ready; None where no other thread runs a pass."""

    def end_backward(self) -> BackwardPass:
        """End the backward pass that has begun, and return it."""
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

        def carry_out() -> None:
            try:
                backward()
            finally:
                ended.append(time.perf_counter())
                arrivals.put(False)

        try:
            handle = self._programs.player.engine.push(
                carry_out, (), (), "computing", "backward", observe=self._programs.observe
            )
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
        self._programs.memory.mark()
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
        waited = self._programs.player.wait_for(weights(number))
        self._programs.memory.join()
        if waited:
            self._times.add_waiting(began)
            thread, now = threading.current_thread().name, time.perf_counter()
            self._programs.observe(OperationSpan("wait for weights", "waiting", thread, began, now))
        self._times.record_read(number)

    def wait_for_replies(self) -> None:
        """Wait until all servers have replied to this step's exchange; their centre may still be on its way."""
        self._programs.player.wait(*map(header, range(self._programs.communicators)))

    def wait_for_buffers(self, _: object = None) -> None:
        """Wait until rank 0's buffers have arrived, and copy them to this rank's, before it reads or updates one."""
        if self.last is None or not self.last.replica.buffers_pending or self.current is not None:
            return
        replica, began = self.last.replica, time.perf_counter()
        replica.buffers_pending = False
        self._programs.player.wait(BUFFERS)
        self._times.add_waiting(began)
        if not replica.discarded and self._programs.collectives.rank:
            self._buffers.unpack()

    def finish(self) -> None:
        """Wait for everything before the program ends or memory is freed; print an error of it to stderr."""
        try:
            self.wait_for_all()
        except (OperationError, UsageError) as error:
            print(f"unisono: the last step has failed: {error}", file=sys.stderr, flush=True)
