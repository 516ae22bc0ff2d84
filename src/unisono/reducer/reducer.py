"""Reducer of a model's gradients: autograd's hooks become the events of the rule's step program, which runs meanwhile.

    backward      w3       w2       w1       w0
    hooks         mark_ready 3, 2   │ mark_ready 1, 0 │
    program       backward 1 ended ─┘  backward 2 ────┴ ended
    engine        pack 1, allreduce 1, settle 1, update 1 ...      what follows each of them (`step/play.py`)

A Setting, the same on all ranks, fixes the buckets, the order in which they are sent and the place of communication in
the step; `tuning.py` finds it. The weight of each rank's gradients is known once the control words of all ranks
(`control.py`) are summed. They are sent with the first gradient.
"""

from __future__ import annotations

import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch.autograd import Variable

from unisono.engine import Span
from unisono.engine.exchanges import Exchanges
from unisono.errors import OperationError, UsageError
from unisono.plan.choose import Setting
from unisono.reducer.attachment import attach, detach, reducer_of
from unisono.reducer.backward_pass import BackwardPass, End, OptimizerStep
from unisono.reducer.buffers import Buffers
from unisono.reducer.control import Word, check_request, check_samples, warning_of
from unisono.reducer.measured import Measured
from unisono.reducer.memory import Memory
from unisono.reducer.programs import Programs
from unisono.reducer.structure import Structure
from unisono.reducer.talk import Talk
from unisono.reducer.tuning import Tuning
from unisono.rules import BaseRule
from unisono.step import operations as op
from unisono.step.build import BUFFERS, WORD
from unisono.step.costs import Prediction
from unisono.step.layout import Updates
from unisono.step.play import Cursor
from unisono.step.program import Task, weights
from unisono.weak import weakly
from unisono.world import World


class Reducer:
    """Gradients of a model on one rank, and their combination with those of the other ranks by a rule."""

    def __init__(self, model: torch.nn.Module, world: World, rule: BaseRule) -> None:
        """Attach to `model`. Called by all ranks of `world` together."""
        self._model, self._structure = weakref.ref(model), Structure(model)
        self._checked = False  # whether the parameters have been looked at since the last backward pass
        self.parameters = self._structure.parameters
        self.rule = rule
        self.measured = Measured(len(self.parameters))
        self.observe: Callable[[Span], None] = lambda _: None
        """Called with the Span of each operation that the engine runs."""
        self.samples: float | None = None
        """Samples that the next average's loss is a mean of, as given by the program; None where none were given."""
        self._first: int | None = None  # first dimension of the last input since the last average
        self._requests: set[str] = set()  # of this rank, that have not been told
        self._last: BackwardPass | None = None  # whose control word is the last one
        self._heard = True  # whether its error or warning has been told
        self._said = self._warned = False  # whether samples have ever been said, and a warning given
        self._buffers = Buffers(model)
        exchanges = world.resource(Exchanges)
        name = f"model {exchanges.enter(self)}"
        self._talk = Talk(exchanges, name)
        self.memory = self._talk.call(lambda world: Memory(self.parameters, world))
        has_buffers = bool(self._buffers.slots) and world.size > 1
        self._programs = Programs(self.memory, exchanges, rule, self._talk, name, weakly(self._observe), has_buffers)
        self._tuning = Tuning(self.memory, self._talk, self.measured, rule)
        weakref.finalize(self, self._tuning.close).atexit = False
        self._pass: BackwardPass | None = None
        self._cursor: Cursor | None = None  # of the last pass, also when it has ended
        self._deferred = False  # whether the backward pass that goes on will not wait for its exchanges
        self._optimizer: OptimizerStep | None = None
        self._updates = Updates.OUTSIDE
        self.clip: float | None = None
        """Largest norm of all gradients together, where the optimizer's updates are in the program."""
        self._arrivals: SimpleQueue[bool] | None = None  # tells the main thread that a gradient is there
        self._sync = True
        self._accumulated = False  # whether some gradients have not been averaged
        self._prepared = False  # whether the setting of the coming backward pass has been asked for
        self._numbers = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        self._programs.adopt(self.setting, self._tuning.order)
        self._left: list[int] = []
        """Parameters whose gradients are ready, but are taken only once the program's own hooks have seen them."""
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(_hook(weakref.ref(self), number))  # type: ignore[no-untyped-call]
            for number, parameter in enumerate(self.parameters)
        ]
        attach(model, self)

    # What the program calls

    def add_samples(self, samples: float) -> None:
        """Add to the number of samples that the next average's loss is a mean of."""
        self.samples = (self.samples or 0.0) + check_samples(samples)

    def see(self, first: torch.Tensor | None) -> None:
        """Note a forward pass. The first dimension of its first input is compared where no samples are given."""
        if self._first is None:
            self.measured.begin()
        self._first = first.shape[0] if first is not None and first.dim() else 1

    def request(self, kind: str) -> None:
        """Request "save" or "stop" of all ranks, with the next control word. A signal handler may call it."""
        self._requests.add(check_request(kind))

    def requests(self) -> Mapping[str, str]:
        """Return the requests of the last control word, each with its origin; wait for that word alone."""
        if self._last is None:
            return {}
        if self._last.agreed is None:
            self._programs.player.wait(WORD)
        return {} if self._last.agreed is None else self._last.agreed.requests

    def backward(self, backward: Callable[[], Any], optimizer: OptimizerStep, updates: Updates) -> None:
        """Run a backward pass whose gradients `optimizer` applies. A step in parts returns before all are applied: wait
        for all (`wait`), or for each parameter that is read (`wait_for`)."""
        self._deferred, self._optimizer, self._updates = True, optimizer, updates
        try:
            self.prepare_for_backward()
            if self._programs.by_main:
                self._beside(backward)
            else:
                backward()
                self._finalize_if_open()
            if updates is Updates.WHOLE:
                self.wait()
        except BaseException:
            self._drop(self._pass)
            raise
        finally:
            self._deferred, self._optimizer, self._updates = False, None, Updates.OUTSIDE

    def synchronize(self) -> None:
        """Average the gradients over all ranks. A rank that has no backward pass in a step calls this in its place.

        It contributes what it has accumulated since the last average. Without that and without samples its weight is 0.
        """
        views = self.memory.views
        there = any(
            parameter.grad is not None
            and (self._accumulated or parameter.grad.is_sparse or parameter.grad.data_ptr() != view.data_ptr())
            for parameter, view in zip(self.parameters, views, strict=True)
        )
        begun = self._begin(absent=self.samples is None and not there)
        try:
            self.finalize()
        except BaseException:
            self._drop(begun)
            raise

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes in the block accumulate gradients on this rank alone. The next one after it averages."""
        self._sync = False
        try:
            yield
        finally:
            self._sync = True

    @property
    def accumulates(self) -> bool:
        """True where gradients of this rank alone have been, or are being, accumulated."""
        return self._accumulated or not self._sync

    def wait(self) -> None:
        """Wait until everything that was begun is finished. Raises OperationError when any of it has failed."""
        began = time.perf_counter()
        self._programs.player.wait()
        self.measured.wait(began)
        self.wait_for_buffers()
        self._hear()

    def wait_for(self, parameter: torch.Tensor) -> None:
        """Wait until a parameter is up to date, before its module's forward pass reads it."""
        number = self._numbers.get(id(parameter))
        if number is None or self._pass is not None:
            return
        began = time.perf_counter()
        if self._programs.player.wait_for(weights(number)):
            self.measured.wait(began)
        self.measured.need(number)

    def wait_for_buffers(self, _: object = None) -> None:
        """Wait until rank 0's buffers have come, and copy them to this rank's, before it reads or updates one."""
        last = self._last
        if last is None or not last.buffers_come or self._pass is not None:
            return
        last.buffers_come, began = False, time.perf_counter()
        self._programs.player.wait(BUFFERS)
        self.measured.wait(began)
        if not last.void and self._talk.rank:
            self._buffers.unpack()

    def drop(self) -> None:
        """Wait for pending work and clear all gradients: the next backward pass makes new ones."""
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
        """Return True where other parameters of the model are trained now than when it was made parallel."""
        return self._structure.differs(model)

    def finish(self) -> None:
        """Wait for pending work before the program ends or memory is freed; print an error of it to stderr."""
        try:
            self.wait()
        except (OperationError, UsageError) as error:
            print(f"unisono: the last step has failed: {error}", file=sys.stderr, flush=True)

    def release(self) -> None:
        """Detach from the model, which behaves like any other from here on."""
        self.finish()
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        model = self._model()
        if model is not None and reducer_of(model) is self:
            detach(model)

    # What goes on

    @property
    def setting(self) -> Setting:
        """Setting that gradients are exchanged with at present."""
        return self._tuning.setting

    @property
    def predicted(self) -> Prediction | None:
        """Prediction of a step from when the setting was chosen; None where nothing was predicted."""
        return self._tuning.predicted

    def _observe(self, span: Span) -> None:
        self.measured.observe(span)
        self.observe(span)

    def mark_ready(self, number: int) -> None:
        """Take a parameter's complete gradient. Raises UsageError for a sparse one."""
        parameter = self.parameters[number]
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise UsageError(
                f"parameter {self._structure.names[number]} has a sparse gradient, which unisono.parallel does not "
                "average: make its module with sparse=False"
            )
        if not self._sync:
            self._accumulated = True
            return
        if self._pass is None:
            begun = self._begin()
            if not self._deferred:
                Variable._execution_engine.queue_callback(End(self.finalize, partial(self._drop, begun)))
        self._take_left()
        hooks = parameter._post_accumulate_grad_hooks
        if next(reversed(hooks)) == self._hooks[number].id:
            self._add(number)
        else:
            self._left.append(number)

    def _take_left(self) -> None:
        """Take the gradients that waited for the program's own hooks, which have been called by now."""
        for number in self._left:
            self._add(number)
        self._left.clear()

    def prepare_for_backward(self) -> None:
        """Adopt a new setting, if there is one. A backward pass is about to begin, or has just begun."""
        self.wait()
        if self._tuning.next_step(self._deferred):
            self._programs.adopt(self.setting, self._tuning.order)
        self._prepared = True

    def _begin(self, absent: bool = False) -> BackwardPass:
        """Begin a pass, when its first gradient is ready or will never come."""
        if not self._checked and (model := self._model()) is not None:
            self.check(model)
        self._checked = False
        if not self._prepared:
            self.prepare_for_backward()
        self._prepared = self._accumulated = self._heard = False
        self.finish_step()  # where the program has left the optimizer's step out: the others average, too
        if self._last is not None and self._last.agreed is None:  # its step had no control word
            self._requests |= self._last.word.requests
        word = Word(self.samples, absent, self._first, frozenset(self._requests))
        self._requests -= word.requests
        layout, program = self._programs.next(self._updates, self._deferred, self.clip)
        self._pass = self._last = BackwardPass(self.memory, self._buffers, layout, word, self._optimizer)
        self._cursor = Cursor(program, self._programs.player, self._pass)
        return self._pass

    def _drop(self, begun: BackwardPass | None) -> None:
        """Discard a backward pass that has failed: nothing of it that is still running may set a gradient."""
        if begun is None or begun is self._pass:
            self._pass = self._last = self.samples = self._first = self._cursor = None
            self._left.clear()
        if begun is not None:
            begun.drop()
            self._requests |= begun.word.requests

    def _hear(self) -> None:
        """Raise the error, or issue the warning, of the last control word."""
        if self._heard or self._last is None or self._last.agreed is None:
            return
        self._heard, agreed = True, self._last.agreed
        if (error := agreed.error()) is not None:
            raise error
        warning = warning_of(agreed, self._said)
        self._said = self._said or bool(agreed.said)
        if warning is not None and not self._warned and self._talk.rank == 0:
            self._warned = True
            warnings.warn(warning, stacklevel=2)

    def _add(self, number: int, there: bool = True) -> None:
        begun, parameter = self._pass, self.parameters[number]
        assert begun is not None, "a pass goes on"
        if there:
            self.measured.come(number)
        gradient = parameter.grad
        if not (self.rule.differs and begun.layout.updates is Updates.OUTSIDE):
            parameter.grad = None  # before it is told: an update may set another at once
        begun.add(number, gradient if begun.word.contributes or self.rule.differs else None)
        self._advance()

    def _advance(self) -> None:
        """Advance the program. The main thread does so where it has to run collectives itself."""
        if self._arrivals is not None:
            self._arrivals.put(True)
        else:
            began = time.perf_counter()
            self._follow()
            if self._programs.by_main:
                self.measured.wait(began)

    def _follow(self) -> None:
        """End each finished task of the outside program, which starts the tasks that follow it."""
        begun, cursor = self._pass, self._cursor
        assert begun is not None and cursor is not None, "a pass goes on"
        while (task := cursor.outside) is not None and _has_ended(task, begun):
            cursor.end(begun.note)

    def finalize(self) -> None:
        """End the backward pass: missing gradients will not come."""
        begun = self._pass
        assert begun is not None, "a pass goes on"
        self._take_left()
        for number in range(len(self.parameters)):
            if number not in begun.fresh:
                self._add(number, there=False)
        begun.ended = True
        self._advance()
        self._tuning.came(begun.order)
        self.measured.begin()
        self.samples = self._first = None
        if self._arrivals is None:
            self._pass = None
            if not self._deferred:
                self.wait()

    def finish_step(self) -> None:
        """Average the weights if the rule does so after this step: the user's optimizer has made its own step."""
        cursor = self._cursor
        if cursor is None or cursor.outside is None or cursor.outside.operation is not op.STEP_ALONE:
            return
        cursor.end(lambda _: None)
        self.wait()

    def _finalize_if_open(self) -> None:
        """End a deferred backward pass that has returned, whatever autograd did within it."""
        if self._pass is not None and not self._pass.ended:
            self.finalize()

    def _beside(self, backward: Callable[[], Any]) -> None:
        """Run a backward pass in another thread, while this one runs its own tasks."""
        arrivals = self._arrivals = SimpleQueue()
        ended: list[float] = []

        def carry_out() -> None:
            try:
                backward()
                self._finalize_if_open()
            finally:
                ended.append(time.perf_counter())
                arrivals.put(False)

        try:
            handle = self._programs.player.engine.push(
                carry_out, (), (), "computing", "backward", observe=self._observe
            )
            while arrivals.get():
                self._follow()
            handle.wait()
            self.measured.wait(ended[0])
            self._pass = None
        finally:
            self._arrivals = None

    def state(self) -> dict[str, Any] | None:
        """Return the setting, for a run that resumes; None while it is being found."""
        return self._tuning.state()

    def restore(self, state: dict[str, Any] | None) -> None:
        """Adopt the setting of the run that is resumed, if it had as many ranks and the same options."""
        if state is not None and self._tuning.restore(state):
            self._programs.adopt(self.setting, self._tuning.order)

    def resume(self, step: int) -> None:
        """Continue after `step` steps: a rule's program may depend on the number of the step."""
        self._programs.number = step

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Give the model the mean of all ranks' weights and buffers within the block, where they differ: for an
        evaluation."""
        self.wait()
        if not self.rule.differs:
            yield
            return
        model = self._model()
        buffers = () if model is None else model.buffers()
        averaged = [one.data for one in (*self.parameters, *buffers) if one.is_floating_point() or one.is_complex()]
        own = [one.clone() for one in averaged]
        for one in averaged:
            one.copy_(self._talk.allreduce(one.div(self._talk.size)))
        try:
            yield
        finally:
            for one, before in zip(averaged, own, strict=True):
                one.copy_(before)

    def say(self, say: Callable[[str], None]) -> None:
        """Report the choices of the first steps through `say`, on rank 0."""
        self._tuning.say = say


def _has_ended(task: Task, begun: BackwardPass) -> bool:
    """Return True where a task of the outside program has ended in a pass that has begun."""
    if task.operation is op.BACKWARD:
        return begun.full(task.key)  # key 0: a pass begins with its first gradient
    if task.operation is op.END:
        return begun.ended
    return task.operation in (op.BEGIN, op.FORWARD)


def _hook(reference: weakref.ref[Reducer], number: int) -> Callable[[torch.Tensor], None]:
    """Return the hook of a parameter. It keeps nothing alive: Python's collector does not see what holds hooks."""

    def complete(_: torch.Tensor) -> None:
        if (reducer := reference()) is not None:
            reducer.mark_ready(number)

    return complete
