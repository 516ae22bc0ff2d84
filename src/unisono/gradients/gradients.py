"""A model's gradients, averaged over the ranks while the backward pass is still going on.

    backward    w3    w2    w1    w0 │
    hooks       └ full: bucket 0 ┘└ 1┘
    engine         pack, exchange, settle 0 ▶ update 0
                        pack, exchange, settle 1 ▶ update 1

What each rank's gradients weigh is known once all have told their samples: an exchange of its own, key 0, which begins
with the first gradient (`meeting.py`). Which buckets there are, in which order they leave and how that is
embedded in the step is a Setting, the same on all ranks; `tuning.py` finds it.
"""

from __future__ import annotations

import atexit
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch.autograd import Variable

from unisono.engine import Handle, Span
from unisono.errors import OperationError, UsageError
from unisono.gradients.attachment import attach, gradients_of
from unisono.gradients.exchange import Exchange
from unisono.gradients.layout import Bucket
from unisono.gradients.measured import Measured
from unisono.gradients.meeting import Meeting
from unisono.gradients.passage import Passage
from unisono.gradients.tuning import Tuning
from unisono.plan.choose import Setting
from unisono.plan.computing import Prediction
from unisono.world import World

Follow = Callable[[int, Sequence[int]], None]
"""Told of each bucket's key when it has been handed over, with the parameters of which nothing is missing after it."""


class Gradients:
    """The gradients of a model, averaged over the ranks of `world`, each rank's weighted by its samples."""

    def __init__(self, model: torch.nn.Module, world: World, exchange: Exchange, embedding: str) -> None:
        """`embedding` is one of `EMBEDDINGS`, or "auto". Called by all ranks together."""
        if gradients_of(model) is not None:
            raise UsageError("the model is parallel already: call unisono.parallel once")
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.measured = Measured(len(self.parameters))
        self.observe: Callable[[Span], None] = lambda _: None
        """Hears of all that the engine carries out."""
        self.follow: Follow = lambda *_: None
        self.samples = 0.0
        """Samples whose gradients have not been averaged yet."""
        self._averaged = 1.0  # samples of the last average: what a second backward pass over the same forward pass has
        self._meeting = Meeting(self.parameters, world, exchange, self._observe)
        memory, among = self._meeting.memory, self._meeting.world
        self._tuning = Tuning(memory, among, self.measured, embedding, exchange.bucket_bytes)
        self._passage: Passage | None = None
        self._deferred = False  # whether the backward pass that goes on will not wait for its exchanges
        self._arrivals: SimpleQueue[bool] | None = None  # tells the main thread that a gradient is there
        self._sync = True
        self._accumulated = False  # whether some gradients have not been averaged
        self._prepared = False  # whether the setting of the coming backward pass has been asked for
        self._updates: dict[int, Handle] = {}
        self._numbers = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        self._meeting.adopt(self.setting, self._tuning.order)
        for number, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(self._hook(number))  # type: ignore[no-untyped-call]
        attach(model, self)
        finish = partial(_finish, weakref.ref(self))
        world.before_free(finish)
        atexit.register(finish)

    # What the program calls

    def count(self, first: torch.Tensor | None) -> None:
        """A forward pass begins: its samples are the length of the first dimension of the first tensor it is given."""
        if self._passage is not None:  # the last backward pass failed half way, and the program went on
            self._passage, self.samples = None, 0.0
            self.wait()
        if not self.samples:
            self.measured.begin()
        self.samples += first.shape[0] if first is not None and first.dim() else 1

    def backward(self, backward: Callable[[], Any]) -> None:
        """Carry a backward pass out, and return before its gradients are averaged: wait for them, or `need` them."""
        self._deferred = True
        try:
            self._prepare()
            if self._meeting.by_main:
                self._beside(backward)
            else:
                backward()
                self._end_if_open()
        finally:
            self._deferred = False

    def exchange(self) -> None:
        """Average the gradients over all ranks. A rank that has no backward pass in a step calls this in its place.

        It gives what it has accumulated since the last average; without samples since then, nothing.
        """
        there = any(parameter.grad is not None for parameter in self.parameters)
        self._begin(self.samples if there else 0.0)
        self._end()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes in the block add to the gradients of this rank alone; the next one after it averages."""
        self._sync = False
        try:
            yield
        finally:
            self._sync = True

    @property
    def accumulates(self) -> bool:
        """Whether gradients of this rank alone are, or are being, added up."""
        return self._accumulated or not self._sync

    def wait(self) -> None:
        """Wait until all that was begun is over. Raises OperationError when something of it has failed."""
        began = time.perf_counter()
        for handle in self._updates.values():
            handle.wait()
        self._updates.clear()
        self._meeting.carrier.wait()
        self.measured.wait(began)

    def need(self, parameter: torch.Tensor) -> None:
        """Wait until a parameter is up to date."""
        number = self._numbers.get(id(parameter))
        if number is None or self._passage is not None:
            return
        if (handle := self._updates.pop(number, None)) is not None:
            began = time.perf_counter()
            handle.wait()
            self.measured.wait(began)
        self.measured.need(number)

    def drop(self) -> None:
        """Have the next backward pass make gradients anew, once the last ones are no longer needed."""
        self.wait()
        for parameter in self.parameters:
            parameter.grad = None

    def let_go(self) -> None:
        """Have no gradient lie in memory that is about to be given back."""
        for parameter, view in zip(self.parameters, self._meeting.memory.views, strict=True):
            if parameter.grad is not None and parameter.grad.data_ptr() == view.data_ptr():
                parameter.grad = None

    def push_update(self, key: int, numbers: Sequence[int], update: Callable[[], object]) -> None:
        """Have these parameters updated when their gradients are there; `key` is that of the last of their buckets."""
        handle = self._meeting.push_update(key, numbers, update)
        self._updates |= dict.fromkeys(numbers, handle)

    @property
    def buckets(self) -> Sequence[Bucket]:
        """In the order of exchange; the first one's key is 1."""
        return self._meeting.buckets

    # What goes on

    @property
    def setting(self) -> Setting:
        """How gradients meet at present."""
        return self._tuning.setting

    @property
    def predicted(self) -> Prediction | None:
        """What a step was predicted to take when the setting was chosen."""
        return self._tuning.predicted

    def _observe(self, span: Span) -> None:
        self.measured.observe(span)
        self.observe(span)

    def _hook(self, number: int) -> Callable[[torch.Tensor], None]:
        """What happens when a parameter's gradient is complete."""

        def complete(_: torch.Tensor) -> None:
            if not self._sync:
                self._accumulated = True
                return
            if self._passage is None:
                self._begin(self.samples or self._averaged)
                if not self._deferred:
                    Variable._execution_engine.queue_callback(self._end)
            self._add(number)

        return complete

    def _prepare(self) -> None:
        """A backward pass is about to begin, or has just begun: this is where the setting may change."""
        self.wait()
        if self._tuning.next_step(self._deferred):
            self._meeting.adopt(self.setting, self._tuning.order)
        self._prepared = True

    def _begin(self, samples: float) -> None:
        """The first gradient of a backward pass is there, or will never be."""
        if not self._prepared:
            self._prepare()
        self._prepared = self._accumulated = False
        self._passage = Passage(self._meeting.buckets, len(self.parameters), samples)

    def _add(self, number: int, there: bool = True) -> None:
        passage, parameter = self._passage, self.parameters[number]
        assert passage is not None, "a pass goes on"
        if there:
            self.measured.come(number)
        passage.add(number, parameter.grad if passage.samples else None)
        parameter.grad = None
        self._advance()

    def _advance(self) -> None:
        """Hand over what is full: the main thread does, where that has to carry something out itself."""
        if self._arrivals is not None:
            self._arrivals.put(True)
        else:
            began = time.perf_counter()
            self._hand_over()
            if self._meeting.by_main:
                self.measured.wait(began)

    def _hand_over(self) -> None:
        assert self._passage is not None, "a pass goes on"
        self._meeting.hand_over(self._passage, self.follow if self._deferred else lambda *_: None)

    def _end(self) -> None:
        """The backward pass has ended."""
        passage = self._passage
        assert passage is not None, "a pass goes on"
        for number in range(len(self.parameters)):
            if number not in passage.fresh:
                self._add(number, there=False)
        passage.ended = True
        self._advance()
        self._tuning.came(passage.order)
        self._averaged = passage.samples or self._averaged
        self.samples = 0.0
        if self._arrivals is None:
            self._passage = None
            if not self._deferred:
                self.wait()

    def _end_if_open(self) -> None:
        """A backward pass that is deferred has returned: its end is here, whatever autograd did within it."""
        if self._passage is not None and not self._passage.ended:
            self._end()

    def _beside(self, backward: Callable[[], Any]) -> None:
        """Carry a backward pass out in another thread, while this one carries out what is its own."""
        arrivals = self._arrivals = SimpleQueue()
        ended: list[float] = []

        def carry_out() -> None:
            try:
                backward()
                self._end_if_open()
            finally:
                ended.append(time.perf_counter())
                arrivals.put(False)

        try:
            handle = self._meeting.carrier.engine.push(carry_out, kind="computing", name="backward")
            while arrivals.get():
                self._hand_over()
            handle.wait()
            self.measured.wait(ended[0])
            self._passage = None
        finally:
            self._arrivals = None

    def state(self) -> dict[str, Any] | None:
        """How gradients meet, for a run that goes on; None while that is being found out."""
        return self._tuning.state()

    def restore(self, state: dict[str, Any] | None) -> None:
        """Let gradients meet as they did in the run that goes on here, if it had as many ranks and was set alike."""
        if state is not None and self._tuning.restore(state):
            self._meeting.adopt(self.setting, self._tuning.order)

    def say(self, say: Callable[[str], None]) -> None:
        """Have what is chosen in the first steps told to `say`, on rank 0."""
        self._tuning.say = say


def _finish(reference: weakref.ref[Gradients]) -> None:
    """Memory is about to be given back, or MPI to end: let what is under way come to an end first."""
    gradients = reference()
    if gradients is None:
        return
    try:
        gradients.wait()
    except OperationError as error:
        print(f"unisono: the last step has failed: {error}", file=sys.stderr, flush=True)
    gradients.let_go()
