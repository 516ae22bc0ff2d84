"""Waits for work of a model that has begun: exchanges, updates and buffers. The time of each wait is counted."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence

import torch

from unisono.engine import OperationSpan
from unisono.engine.spans import Observe
from unisono.errors import OperationError, UsageError
from unisono.reducer.buffers import Buffers
from unisono.reducer.pass_runner import PassRunner
from unisono.reducer.programs import Programs
from unisono.reducer.step_control import StepControl
from unisono.reducer.step_times import StepTimes
from unisono.step.build import BUFFERS
from unisono.step.elastic import header
from unisono.step.program import weights


class PendingWork:
    """Work of one rank's model that is pending."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        buffers: Buffers,
        programs: Programs,
        runner: PassRunner,
        control: StepControl,
        times: StepTimes,
        observe: Observe,
        rank: int,
    ) -> None:
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._buffers, self._programs, self._runner, self._control = buffers, programs, runner, control
        self._times, self._observe, self._rank = times, observe, rank

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
        if number is None or self._runner.current is not None:
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
        last = self._runner.last
        if last is None or not last.buffers_pending or self._runner.current is not None:
            return
        last.buffers_pending, began = False, time.perf_counter()
        self._programs.player.wait(BUFFERS)
        self._times.add_waiting(began)
        if not last.discarded and self._rank:
            self._buffers.unpack()

    def finish(self) -> None:
        """Wait for everything before the program ends or memory is freed; print an error of it to stderr."""
        try:
            self.wait_for_all()
        except (OperationError, UsageError) as error:
            print(f"unisono: the last step has failed: {error}", file=sys.stderr, flush=True)
