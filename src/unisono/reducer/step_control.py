"""Control messages of one rank, step after step: contents of the next one, and the results of the last one.

add_samples, request, first dimension of the input ─▶ next message ─▶ sum of all ranks ─▶ requests, error, warning
                                                                      (`control.py`)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from unisono.reducer.control import ControlMessage, ControlResult, check_request, check_samples, warning_of


class MessageInFlight(Protocol):
    """Control message of a backward pass, whose result is not known at first."""

    control_message: ControlMessage
    control_result: ControlResult | None


class StepControl:
    """Control messages of one rank of `ranks`."""

    def __init__(self, rank: int, ranks: int, wait: Callable[[], None]) -> None:
        """Begin without samples and requests; `wait` waits until the result of the last message is known."""
        self._rank, self._ranks, self._wait = rank, ranks, wait
        self.samples: float | None = None
        """Samples that the next average's loss is a mean of, as given by the program; None where none were given."""
        self.averages = 0
        """Number of averages that have ended."""
        self._first_dimension: int | None = None  # first dimension of the last input since the last average
        self._requests: set[str] = set()  # of this rank, not yet sent
        self._last: MessageInFlight | None = None
        self._reported: ControlResult | None = None  # the last result whose error or warning was reported
        self._samples_ever_given = self._warned = False

    def add_samples(self, samples: float) -> None:
        """Add to the number of samples that the next average's loss is a mean of."""
        self.samples = (self.samples or 0.0) + check_samples(samples)

    def record_input(self, first: torch.Tensor | None) -> bool:
        """Record the first input of a forward pass, whose first dimension is compared where no samples are given.

        Return True for the first forward pass since the last average.
        """
        began = self._first_dimension is None
        self._first_dimension = first.shape[0] if first is not None and first.dim() else 1
        return began

    def request(self, kind: str) -> None:
        """Request "save", "stop" or "join" of all ranks with the next control message; a signal handler may call it."""
        self._requests.add(check_request(kind))

    def requests(self) -> Mapping[str, str]:
        """Return the requests of the last control message, each with its origin; wait for that message alone."""
        if self._last is None:
            return {}
        if self._last.control_result is None:
            self._wait()
        return {} if self._last.control_result is None else self._last.control_result.requests

    def requested_by_all(self, kind: str) -> bool:
        """Return True where all ranks have made a request with the last control message."""
        result = None if self._last is None else self._last.control_result
        return result is not None and result.counts.get(kind) == self._ranks

    def next_message(self, absent: bool, changes: int | None = None) -> ControlMessage:
        """Return the message of a pass that begins. Requests that the last pass has not sent are in it again."""
        if self._last is not None and self._last.control_result is None:  # its step had no control message
            self._requests |= self._last.control_message.requests
        message = ControlMessage(self.samples, absent, self._first_dimension, frozenset(self._requests), changes)
        self._requests -= message.requests
        return message

    def begin(self, message: MessageInFlight) -> None:
        """Follow the message of a pass that has begun."""
        self._last = message

    def end_pass(self) -> None:
        """Begin to count the samples of the next average: those of this one were sent."""
        self.samples = self._first_dimension = None
        self.averages += 1

    def discard(self) -> None:
        """Discard the samples and the message of a pass that has failed."""
        self.end_pass()
        self._last = None

    def renew(self, message: ControlMessage) -> None:
        """Make the requests of a failed pass's message again."""
        self._requests |= message.requests

    def check(self) -> None:
        """Raise the error, or issue the warning, of the last control message: once, when its result is known."""
        result = None if self._last is None else self._last.control_result
        if result is None or result is self._reported:
            return
        self._reported = result
        if (error := result.error()) is not None:
            raise error
        warning = warning_of(result, self._samples_ever_given)
        self._samples_ever_given = self._samples_ever_given or bool(result.samples_given)
        if warning is not None and not self._warned and self._rank == 0:
            self._warned = True
            warnings.warn(warning, stacklevel=2)
