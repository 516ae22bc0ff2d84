"""A model's gradients, averaged over the ranks while the backward pass is still going on.

    backward    w3    w2    w1    w0 │
    hooks       └ full: bucket 0 ┘└ 1┘
    engine         pack, exchange, settle 0 ▶ update 0
                        pack, exchange, settle 1 ▶ update 1

What each rank's gradients weigh is known once all have told their control words (`control.py`): an exchange of its own,
key 0, which begins with the first gradient (`meeting.py`). Which buckets there are, in which order they leave and how
that is embedded in the step is a Setting, the same on all ranks; `tuning.py` finds it.
"""

from __future__ import annotations

import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch.autograd import Variable

from unisono.engine import Handle, Span
from unisono.engine.embeddings import gradient
from unisono.errors import OperationError, UsageError
from unisono.gradients.attachment import attach, detach, gradients_of
from unisono.gradients.buffers import Buffers
from unisono.gradients.control import Word, check_request, check_samples, warning_of
from unisono.gradients.exchange import Exchange
from unisono.gradients.layout import Bucket
from unisono.gradients.measured import Measured
from unisono.gradients.meeting import Meeting
from unisono.gradients.passage import End, Passage
from unisono.gradients.structure import Structure
from unisono.gradients.tuning import Tuning
from unisono.plan.choose import Setting
from unisono.plan.computing import Prediction
from unisono.weak import weakly
from unisono.world import World

Follow = Callable[[int, Sequence[int]], None]
"""Told of each bucket's key when it has been handed over, with the parameters of which nothing is missing after it."""


class Gradients:
    """The gradients of a model, averaged over the ranks of `world`, each rank's weighted by its samples."""

    def __init__(self, model: torch.nn.Module, world: World, exchange: Exchange, embedding: str) -> None:
        """`embedding` is one of `EMBEDDINGS`, or "auto". Called by all ranks together."""
        self._model, self._structure = weakref.ref(model), Structure(model)
        self._checked = False  # whether the parameters have been looked at since the last backward pass
        self.parameters = self._structure.parameters
        self.measured = Measured(len(self.parameters))
        self.observe: Callable[[Span], None] = lambda _: None
        """Hears of all that the engine carries out."""
        self.follow: Follow = lambda *_: None
        self.samples: float | None = None
        """Samples that the next average's loss is a mean of, as the program has said; None where it has not."""
        self._first: int | None = None  # first dimension of the last input since the last average
        self._requests: set[str] = set()  # of this rank, that have not been told
        self._last: Passage | None = None  # whose control word is the last one
        self._heard = True  # whether its error or warning has been told
        self._said = self._warned = False  # whether samples have ever been said, and a warning given
        self._buffers = Buffers(model)
        self._meeting = Meeting(self.parameters, self._buffers, world, exchange, weakly(self._observe), self)
        memory, among = self._meeting.memory, self._meeting.talk
        self._tuning = Tuning(memory, among, self.measured, embedding, exchange.bucket_bytes)
        weakref.finalize(self, self._tuning.close).atexit = False
        self._passage: Passage | None = None
        self._deferred = False  # whether the backward pass that goes on will not wait for its exchanges
        self._arrivals: SimpleQueue[bool] | None = None  # tells the main thread that a gradient is there
        self._sync = True
        self._accumulated = False  # whether some gradients have not been averaged
        self._prepared = False  # whether the setting of the coming backward pass has been asked for
        self._updates: dict[int, Handle] = {}
        self._numbers = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        self._meeting.adopt(self.setting, self._tuning.order)
        self._left: list[int] = []
        """Gradients that are there, and are taken once the program's own hooks have seen them."""
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(_hook(weakref.ref(self), number))  # type: ignore[no-untyped-call]
            for number, parameter in enumerate(self.parameters)
        ]
        attach(model, self)

    # What the program calls

    def add_samples(self, samples: float) -> None:
        """Add to the samples that the next average's loss is a mean of."""
        self.samples = (self.samples or 0.0) + check_samples(samples)

    def see(self, first: torch.Tensor | None) -> None:
        """A forward pass begins; the first dimension of its first input is compared where nobody says the samples."""
        if self._first is None:
            self.measured.begin()
        self._first = first.shape[0] if first is not None and first.dim() else 1

    def request(self, kind: str) -> None:
        """Have all ranks told with the next control word: "save" or "stop". A signal handler may call it."""
        self._requests.add(check_request(kind))

    def requests(self) -> Mapping[str, str]:
        """Return what was requested in the last control word, and by whom; wait for that word alone."""
        if self._last is None:
            return {}
        if self._last.agreed is None:
            self._meeting.carrier.wait(gradient(0))
        return {} if self._last.agreed is None else self._last.agreed.requests

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
        except BaseException:
            self._drop(self._passage)
            raise
        finally:
            self._deferred = False

    def synchronize(self) -> None:
        """Average the gradients over all ranks. A rank that has no backward pass in a step calls this in its place.

        It gives what it has accumulated since the last average; without that and without samples it weighs nothing.
        """
        views = self._meeting.memory.views
        there = any(
            parameter.grad is not None
            and (self._accumulated or parameter.grad.is_sparse or parameter.grad.data_ptr() != view.data_ptr())
            for parameter, view in zip(self.parameters, views, strict=True)
        )
        passage = self._begin(absent=self.samples is None and not there)
        try:
            self._end()
        except BaseException:
            self._drop(passage)
            raise

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
        self.need_buffer()
        self._hear()

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

    def need_buffer(self, _: object = None) -> None:
        """Wait until rank 0's buffers have come, and take them over: before this rank reads one, or updates it."""
        last = self._last
        if last is None or not last.buffers or self._passage is not None:
            return
        last.buffers, began = False, time.perf_counter()
        self._meeting.wait_for_buffers()
        self.measured.wait(began)
        if not last.void and self._meeting.talk.rank:
            self._buffers.unpack()

    def drop(self) -> None:
        """Have the next backward pass make gradients anew, once the last ones are no longer needed."""
        self.wait()
        for parameter in self.parameters:
            parameter.grad = None

    def check(self, model: torch.nn.Module) -> None:
        """Raise UsageError when a parameter is trained that was not when the model was made parallel."""
        self._checked = True
        if (name := self._structure.added(model)) is not None:
            raise UsageError(
                f"parameter {name} was added, replaced or unfrozen after the model was made parallel, so that nothing "
                "would average its gradient: call unisono.parallel(model, world) again, on all ranks, and make a new "
                "Trainer if one trains the model"
            )

    def differs(self, model: torch.nn.Module) -> bool:
        """Whether other parameters of the model are trained now than when it was made parallel."""
        return self._structure.differs(model)

    def finish(self) -> None:
        """The program ends, or memory is about to be given back: let what is under way come to an end first."""
        try:
            self.wait()
        except (OperationError, UsageError) as error:
            print(f"unisono: the last step has failed: {error}", file=sys.stderr, flush=True)

    def release(self) -> None:
        """Let go of the model, which is like any other from here on."""
        self.finish()
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        model = self._model()
        if model is not None and gradients_of(model) is self:
            detach(model)

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

    def complete(self, number: int) -> None:
        """A parameter's gradient is complete."""
        parameter = self.parameters[number]
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise UsageError(
                f"parameter {self._structure.names[number]} has a sparse gradient, which unisono.parallel does not "
                "average: make its module with sparse=False"
            )
        if not self._sync:
            self._accumulated = True
            return
        if self._passage is None:
            passage = self._begin()
            if not self._deferred:
                Variable._execution_engine.queue_callback(End(self._end, partial(self._drop, passage)))
        self._take_left()
        hooks = parameter._post_accumulate_grad_hooks
        if next(reversed(hooks)) == self._hooks[number].id:
            self._add(number)
        else:
            self._left.append(number)

    def _take_left(self) -> None:
        """Take the gradients of which the program's own hooks, behind this one, have been called by now."""
        for number in self._left:
            self._add(number)
        self._left.clear()

    def _prepare(self) -> None:
        """A backward pass is about to begin, or has just begun: this is where the setting may change."""
        self.wait()
        if self._tuning.next_step(self._deferred):
            self._meeting.adopt(self.setting, self._tuning.order)
        self._prepared = True

    def _begin(self, absent: bool = False) -> Passage:
        """The first gradient of a backward pass is there, or will never be."""
        if not self._checked and (model := self._model()) is not None:
            self.check(model)
        self._checked = False
        if not self._prepared:
            self._prepare()
        self._prepared = self._accumulated = self._heard = False
        word = Word(self.samples, absent, self._first, frozenset(self._requests))
        self._requests -= word.requests
        self._passage = self._last = Passage(self._meeting.buckets, len(self.parameters), word)
        return self._passage

    def _drop(self, passage: Passage | None) -> None:
        """A backward pass has failed: nothing of it that is under way may set a gradient, and the next begins anew."""
        if passage is None or passage is self._passage:
            self._passage = self._last = self.samples = self._first = None
            self._left.clear()
        if passage is not None:
            passage.drop()
            self._requests |= passage.word.requests

    def _hear(self) -> None:
        """Raise the error, or give the warning, that the last control word told all ranks of."""
        if self._heard or self._last is None or self._last.agreed is None:
            return
        self._heard, agreed = True, self._last.agreed
        if (error := agreed.error()) is not None:
            raise error
        warning = warning_of(agreed, self._said)
        self._said = self._said or bool(agreed.said)
        if warning is not None and not self._warned and self._meeting.talk.rank == 0:
            self._warned = True
            warnings.warn(warning, stacklevel=2)

    def _add(self, number: int, there: bool = True) -> None:
        passage, parameter = self._passage, self.parameters[number]
        assert passage is not None, "a pass goes on"
        if there:
            self.measured.come(number)
        passage.add(number, parameter.grad if passage.word.contributes else None)
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
        self._take_left()
        for number in range(len(self.parameters)):
            if number not in passage.fresh:
                self._add(number, there=False)
        passage.ended = True
        self._advance()
        self._tuning.came(passage.order)
        self.measured.begin()
        self.samples = self._first = None
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
            handle = self._meeting.carrier.begin(carry_out, (), "computing", "backward")
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


def _hook(reference: weakref.ref[Gradients], number: int) -> Callable[[torch.Tensor], None]:
    """The hook of a parameter, which keeps nothing alive: Python's collector does not see what holds hooks."""

    def complete(_: torch.Tensor) -> None:
        if (gradients := reference()) is not None:
            gradients.complete(number)

    return complete
