"""Reducer of a model's gradients: autograd's hooks become the events of the rule's step program, which runs meanwhile.

    backward      w3       w2       w1       w0
    hooks         mark_ready 3, 2   │ mark_ready 1, 0 │
    program       backward 1 ended ─┘  backward 2 ────┴ ended
    engine        pack 1, allreduce 1, set_grads 1, update 1 ...   the tasks that follow (`step/play.py`)

A Setting, the same on all ranks, fixes the buckets, the order in which they are sent and the place of communication in
the step; `tuning.py` finds it. The weight of each rank's gradients is known once the control messages of all ranks
(`control.py`) are summed. They are sent with the first gradient.
"""

from __future__ import annotations

import sys
import threading
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

from unisono.asynchronous.exchange import WorkerExchange
from unisono.engine import OperationSpan
from unisono.engine.communicator_pool import CommunicatorPool
from unisono.errors import OperationError, UsageError
from unisono.optimizers.segments import Segment
from unisono.optimizers.sharded import ShardedStep, check_optimizer, needs_norms
from unisono.plan.choose import Candidate, PredictionInputs, Setting
from unisono.plan.choose_rule import describe, rank_rules
from unisono.reducer.attachment import attach, detach, reducer_of
from unisono.reducer.backward_pass import BackwardEndCallback, BackwardPass, OptimizerStep
from unisono.reducer.bucket_memory import BucketMemory
from unisono.reducer.buffers import Buffers
from unisono.reducer.control import ControlMessage, check_request, check_samples, warning_of
from unisono.reducer.exchanging_pass import ExchangingPass, centre_in, flats_of
from unisono.reducer.model_collectives import ModelCollectives
from unisono.reducer.parameter_parts import UNSPLIT, ParameterParts
from unisono.reducer.period_search import PeriodSearch
from unisono.reducer.programs import Programs
from unisono.reducer.rule_state import RuleState, without_changes
from unisono.reducer.scattered_gradient import ScatteredGradient
from unisono.reducer.server_links import ServerLinks
from unisono.reducer.sharded_optimizer import ShardedOptimizer
from unisono.reducer.sharded_pass import ShardedPass
from unisono.reducer.step_times import StepTimes
from unisono.reducer.structure import Structure
from unisono.reducer.tuning import Tuning
from unisono.reducer.weight_first import Readings, restore, take
from unisono.rules import BaseRule
from unisono.rules.asynchronous import BaseAsynchronousRule
from unisono.step import operations as op
from unisono.step.build import BUFFERS, CONTROL
from unisono.step.costs import Prediction
from unisono.step.elastic import header
from unisono.step.layout import Layout, Updates
from unisono.step.play import Cursor
from unisono.step.program import Task, weights
from unisono.step.shards import STEP
from unisono.weak import weakly
from unisono.world import World


class Reducer:
    """Gradients of a model on one rank, and their combination with those of the other ranks by a rule."""

    def __init__(self, model: torch.nn.Module, world: World, rule: BaseRule, parts: ParameterParts = UNSPLIT) -> None:
        """Attach to `model`, of whose parameters `parts` are split. Called by all ranks of `world` together."""
        self._model, self._structure = weakref.ref(model), Structure(model)
        self._checked = False  # whether the parameters have been looked at since the last backward pass
        self.parameters = self._structure.parameters
        self.rule = rule
        self.times = StepTimes(len(self.parameters))
        self.observe: Callable[[OperationSpan], None] = lambda _: None
        """Called with the Span of each operation that the engine runs."""
        self.samples: float | None = None
        """Samples that the next average's loss is a mean of, as given by the program; None where none were given."""
        self._first_dimension: int | None = None  # first dimension of the last input since the last average
        self._requests: set[str] = set()  # of this rank, not yet sent
        self._last_pass: BackwardPass | None = None  # the pass of the last control message
        self._control_checked = True  # whether its error or warning was reported
        self._samples_ever_given = self._warned = False  # whether samples were ever given, and a warning issued
        self._buffers = Buffers(model)
        pool = world.resource(CommunicatorPool)
        self._collectives = ModelCollectives(pool, name := f"model {pool.register(self)}")
        partitions = list(parts.holders.values())
        holders = {count: pool.part_worlds(partition, 1)[1][0] for count, partition in parts.holders.items()}
        self.memory = self._collectives.call(lambda world: BucketMemory(self.parameters, world, parts, holders))
        has_buffers = bool(self._buffers.slots) and world.size > 1
        self.exchange: WorkerExchange | None = None
        """This worker's end of its exchanges, where the rule is asynchronous."""
        self.links = ServerLinks(rule, world, self._collectives) if isinstance(rule, BaseAsynchronousRule) else None
        """Links to the servers of an asynchronous rule."""
        self._programs = Programs(
            self.memory, pool, rule, self._collectives, name, weakly(self._observe), has_buffers, self.links, partitions
        )
        self._tuning = Tuning(self.memory, self._collectives, self.times, rule)
        weakref.finalize(self, self._tuning.close).atexit = False
        self._pass: BackwardPass | None = None
        self._cursor: Cursor | None = None  # of the last pass, also when it has ended
        self._optimizer: OptimizerStep | ShardedStep | None = None
        self._updates = Updates.OUTSIDE
        self.clip: float | None = None
        """Largest norm of all gradients together, where the optimizer's updates are in the program."""
        self._arrivals: SimpleQueue[bool] | None = None  # wakes the main thread when a gradient is ready
        self._sync, self._accumulated = True, False  # whether the next pass averages; some gradients are not averaged
        # whether the running backward pass does not wait for its exchanges; the setting of the coming backward pass has
        # been asked for; the user's optimizer makes its step
        self._deferred = self._prepared = self._stepping = False
        self._numbers = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        self.sharded_optimizer: ShardedOptimizer | None = None
        """Optimizer whose state is in shards, where the rule is sharded and `shard` was called."""
        self._offered: torch.optim.Optimizer | None = None
        self._rule_state = RuleState(self.memory, world.rank, world.size)
        self._period = PeriodSearch(rule, self.memory, self._collectives) if rule.measures_period else None
        self._programs.adopt(self.setting, self._tuning.order)
        self._postponed: list[int] = []
        """Parameters whose gradients are ready, but are added only after the program's own hooks have run."""
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(_hook(weakref.ref(self), number))  # type: ignore[no-untyped-call]
            for number, parameter in enumerate(self.parameters)
        ]
        self._readings = take(model, self.parameters, world.size, weakly(self._on_reading_ended))
        attach(model, self)

    # Called by the program

    def add_samples(self, samples: float) -> None:
        """Add to the number of samples that the next average's loss is a mean of."""
        self.samples = (self.samples or 0.0) + check_samples(samples)

    def on_forward(self, first: torch.Tensor | None) -> None:
        """Record a forward pass. The first dimension of its first input is compared where no samples are given."""
        self._readings.clear()  # of a pass that needed gradients of weights alone
        if self._first_dimension is None:
            self.times.begin()
        self._first_dimension = first.shape[0] if first is not None and first.dim() else 1

    def request(self, kind: str) -> None:
        """Request "save", "stop" or "join" of all ranks with the next control message; a signal handler may call it."""
        self._requests.add(check_request(kind))

    def requests(self) -> Mapping[str, str]:
        """Return the requests of the last control message, each with its origin; wait for that message alone."""
        if self._last_pass is None:
            return {}
        if self._last_pass.control_result is None:
            self._programs.player.wait(CONTROL)
        return {} if self._last_pass.control_result is None else self._last_pass.control_result.requests

    def requested_by_all(self, kind: str) -> bool:
        """Return True where all ranks have made a request with the last control message."""
        result = None if self._last_pass is None else self._last_pass.control_result
        return result is not None and result.counts.get(kind) == self._collectives.size

    def shard(self, optimizer: torch.optim.Optimizer, own_loop: bool) -> None:
        """Let the optimizer keep the state of this rank's shards alone. Called by all ranks together.

        With `own_loop` its step is made when the program calls it. Raises UsageError for an optimizer that cannot be
        stepped in shards.
        """
        if self.sharded_optimizer is not None:
            if self.sharded_optimizer.optimizer is optimizer:
                return
            self.wait()
            self.sharded_optimizer.release()
        parts = (optimizer, self.parameters, self._collectives, weakly(self.wait))
        self.sharded_optimizer = ShardedOptimizer(*parts)
        self._programs.layer_norms = self.sharded_optimizer.needs_norms
        self.sharded_optimizer.lay_out(self._segments())
        if own_loop:
            self.sharded_optimizer.follow(weakly(self.begin_step), weakly(self._end_step))

    def begin_step(self) -> None:
        """Clear the gradients before the user's optimizer is called: it has nothing to update by itself."""
        self._stepping = True
        for parameter in self.parameters:
            if isinstance(parameter.grad, ScatteredGradient):
                parameter.grad = None

    def _end_step(self) -> None:
        self._stepping = False
        self.finish_step(stepped=True)

    def backward(self, backward: Callable[[], Any], optimizer: OptimizerStep | ShardedStep, updates: Updates) -> None:
        """Run a backward pass whose gradients `optimizer` applies. A step in parts returns before all are applied: wait
        for all (`wait`), or for each parameter that is read (`wait_for`)."""
        self._deferred, self._optimizer, self._updates = True, optimizer, updates
        try:
            self.prepare_for_backward()
            if self._programs.by_main:
                self._run_beside_main(backward)
            else:
                backward()
                self._finalize_if_open()
            if updates is Updates.WHOLE:
                self.wait()
        except BaseException:
            self._discard(self._pass)
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
            and not isinstance(parameter.grad, ScatteredGradient)
            and (self._accumulated or parameter.grad.is_sparse or parameter.grad.data_ptr() != view.data_ptr())
            for parameter, view in zip(self.parameters, views, strict=True)
        )
        begun = self._begin(absent=self.samples is None and not there)
        try:
            self.finalize()
        except BaseException:
            self._discard(begun)
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
        """Wait until everything that was begun is finished, except exchanges that run beside later steps. Raises
        OperationError when any of it has failed."""
        began = time.perf_counter()
        self._programs.player.wait()
        self.times.add_waiting(began)
        self.wait_for_buffers()
        self._check_control()

    def wait_for(self, parameter: torch.Tensor) -> None:
        """Wait until a parameter is up to date, before its module's forward pass reads it."""
        number = self._numbers.get(id(parameter))
        if number is None or self._pass is not None:
            return
        began = time.perf_counter()
        if self._programs.player.wait_for(weights(number)):
            self.times.add_waiting(began)
            thread, now = threading.current_thread().name, time.perf_counter()
            self.observe(OperationSpan("wait for weights", "waiting", thread, began, now))
        self.times.record_read(number)

    def wait_for_replies(self) -> None:
        """Wait until all servers have replied to this step's exchange; their centre may still be on its way."""
        self._programs.player.wait(*map(header, range(self._programs.communicators)))

    def layout(self) -> Layout:
        """Return the layout of the model's buckets, for the programs of a server."""
        return self._programs.layout()

    def flats(self) -> dict[int, torch.Tensor]:
        """Return copies of the weights, by key, as buckets hold them: the beginning of a centre."""
        self.wait()
        return flats_of(self.memory, range(1, len(self._programs.layout().buckets) + 1))

    def buffers(self) -> Buffers:
        """Return the model's buffers and the memory they are sent in."""
        return self._buffers

    @contextmanager
    def centre(
        self, centre: Mapping[int, torch.Tensor], buffers: torch.Tensor | None, wait: bool = True
    ) -> Iterator[None]:
        """Give the model the weights and buffers of a centre within the block; `wait` for pending work first."""
        if wait:
            self.wait()
        with torch.no_grad(), centre_in(self.memory, self._buffers, centre, buffers):
            yield

    def wait_for_buffers(self, _: object = None) -> None:
        """Wait until rank 0's buffers have arrived, and copy them to this rank's, before it reads or updates one."""
        last = self._last_pass
        if last is None or not last.buffers_pending or self._pass is not None:
            return
        last.buffers_pending, began = False, time.perf_counter()
        self._programs.player.wait(BUFFERS)
        self.times.add_waiting(began)
        if not last.discarded and self._collectives.rank:
            self._buffers.unpack()

    def zero_grad(self) -> None:
        """Wait for pending work and clear all gradients: the next backward pass makes new ones."""
        self.wait()
        for parameter in self.parameters:
            parameter.grad = None

    def check_parameters(self, model: torch.nn.Module) -> None:
        """Raise UsageError when a parameter is trained that was not when the model was made parallel."""
        self._checked = True
        if (name := self._structure.added(model)) is not None:
            raise UsageError(
                f"parameter {name} was added, replaced or unfrozen after the model was made parallel, so its gradient "
                "would not be averaged: call unisono.parallel(model, world) again, on all ranks, and make a new "
                "Trainer if one trains the model"
            )

    def parameters_changed(self, model: torch.nn.Module) -> bool:
        """Return True where other parameters of the model are trained now than when it was made parallel."""
        return self._structure.differs(model)

    def finish(self) -> None:
        """Wait for pending work before the program ends or memory is freed; print an error of it to stderr."""
        try:
            self.wait()
            self._programs.player.wait_over_steps()
        except (OperationError, UsageError) as error:
            print(f"unisono: the last step has failed: {error}", file=sys.stderr, flush=True)

    def release(self) -> None:
        """Detach from the model, which behaves like any other from here on."""
        self.finish()
        for handle in self._hooks:
            handle.remove()
        if self.sharded_optimizer is not None:
            self.sharded_optimizer.release()
        self._hooks.clear()
        model = self._model()
        if model is not None:
            restore(model, self._readings)
            if reducer_of(model) is self:
                detach(model)

    # While a backward pass runs

    @property
    def setting(self) -> Setting:
        """Setting that gradients are exchanged with at present."""
        return self._tuning.setting

    @property
    def predicted(self) -> Prediction | None:
        """Prediction of a step from when the setting was chosen; None where nothing was predicted."""
        return None if self._tuning.chosen is None else self._tuning.chosen.prediction

    @property
    def chosen(self) -> Candidate | None:
        """Chosen setting with its prediction and what was played for it; None where nothing was predicted."""
        return self._tuning.chosen

    def _observe(self, span: OperationSpan) -> None:
        self.times.observe(span)
        self.observe(span)

    def mark_ready(self, number: int) -> None:
        """Add a parameter's complete gradient. Raises UsageError for a sparse one."""
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
                Variable._execution_engine.queue_callback(
                    BackwardEndCallback(self.finalize, partial(self._discard, begun))
                )
        self._add_postponed()
        hooks = parameter._post_accumulate_grad_hooks
        if next(reversed(hooks)) == self._hooks[number].id:
            self._add(number)
        else:
            self._postponed.append(number)

    def _add_postponed(self) -> None:
        """Add the gradients that waited for the program's own hooks, which have run by now."""
        for number in self._postponed:
            self._add(number)
        self._postponed.clear()

    def prepare_for_backward(self) -> None:
        """Adopt a new setting, if there is one. A backward pass is about to begin, or has just begun."""
        self.wait()
        if self._tuning.next_step(self._deferred):
            self._adopt_setting()
        if self.rule.alternatives and self._tuning.inputs is not None:
            self._choose_rule(self._tuning.inputs)
        if self._period is not None and (found := self._period.next_step()) is not None:
            self._set_rule(found[0])
            if self._collectives.rank == 0:
                self._tuning.log(found[1])
        self._rule_state.lay_out(self.rule.keeps_anchor)
        self._prepared = True

    def _adopt_setting(self) -> None:
        self._rule_state.gather()
        self._programs.adopt(self.setting, self._tuning.order)
        if self.sharded_optimizer is not None:
            self.sharded_optimizer.lay_out(self._segments())

    def _segments(self) -> list[Segment]:
        """Return this rank's segments of all buckets."""
        rank, ranks = self._collectives.rank, self._collectives.size
        keys = self._programs.layout().keys
        return [one.segment for key in keys for one in self.memory.segments(key, ranks, rank)]

    def offer(self, optimizer: torch.optim.Optimizer) -> None:
        """Offer an optimizer that may be sharded, for a rule that chooses."""
        self._offered = optimizer

    def _choose_rule(self, inputs: PredictionInputs) -> None:
        """Adopt the alternative that is predicted to be the fastest: all ranks have the same measurements."""
        rules, optimizer = self.rule.alternatives, self._offered
        try:
            if optimizer is not None:
                check_optimizer(optimizer)
        except UsageError:
            optimizer = None
        if optimizer is None:
            rules = tuple(one for one in rules if not one.sharded)
        norms = optimizer is not None and needs_norms(optimizer)
        ranked = rank_rules(rules, inputs._replace(clip=self.clip, layer_norms=norms), *self._tuning.space)
        if ranked[0].rule.sharded:
            self._tuning.chosen = ranked[0].best
            self._tuning.setting = ranked[0].best.setting
        self._adopt_rule(ranked[0].rule)
        if self._collectives.rank == 0:
            self._tuning.log(describe(ranked))

    def _adopt_rule(self, rule: BaseRule) -> None:
        """Adopt an alternative of the rule. A sharded one takes the optimizer over."""
        self._set_rule(rule)
        self._adopt_setting()
        if rule.sharded and self._offered is not None:
            self.shard(self._offered, own_loop=False)
            if self._optimizer is not None and self.sharded_optimizer is not None:
                self._optimizer, self._updates = self.sharded_optimizer.begin(), Updates.PARTS

    def _set_rule(self, rule: BaseRule) -> None:
        self.rule, self._period = rule, None
        self._programs.set_rule(rule)

    def _begin(self, absent: bool = False) -> BackwardPass:
        """Begin a pass, when its first gradient is ready, or when the rank has none."""
        if not self._checked and (model := self._model()) is not None:
            self.check_parameters(model)
        self._checked = False
        if not self._prepared:
            self.prepare_for_backward()
        self._prepared = self._accumulated = self._control_checked = False
        self.finish_step()  # if the program has left out the optimizer's step, as the other ranks average
        if self._last_pass is not None and self._last_pass.control_result is None:  # its step had no control message
            self._requests |= self._last_pass.control_message.requests
        control_message = ControlMessage(self.samples, absent, self._first_dimension, frozenset(self._requests))
        self._requests -= control_message.requests
        layout, program = self._programs.next(self._updates, self._deferred, self.clip)
        self._pass = self._new_pass(layout, control_message)
        self._last_pass = self._pass
        self._cursor = Cursor(program, self._programs.player, self._pass)
        return self._pass

    def _new_pass(self, layout: Layout, control_message: ControlMessage) -> BackwardPass:
        parts = (self.memory, self._buffers, layout, control_message)
        step = self._optimizer
        if self.rule.sharded:
            if self.sharded_optimizer is None:
                raise UsageError(f"{type(self.rule).__name__} needs the optimizer: call Reducer.shard(optimizer)")
            begun = ShardedPass(*parts, self._collectives.rank)
            if isinstance(step, ShardedStep):
                begun.step_with(step)
            return begun
        assert not isinstance(step, ShardedStep), "only sharded rules have such steps"
        if self.exchange is None:
            return BackwardPass(*parts, step, self._rule_state.kept)
        return ExchangingPass(*parts, step, self.exchange)

    def _discard(self, begun: BackwardPass | None) -> None:
        """Discard a backward pass that has failed: nothing of it that is still running may set a gradient."""
        if begun is None or begun is self._pass:
            self._pass = self._last_pass = self.samples = self._first_dimension = self._cursor = None
            self._postponed.clear()
            self._readings.clear()
        if begun is not None:
            begun.discard()
            self._requests |= begun.control_message.requests

    def _check_control(self) -> None:
        """Raise the error, or issue the warning, of the last control message."""
        if self._control_checked or self._last_pass is None or self._last_pass.control_result is None:
            return
        self._control_checked, control_result = True, self._last_pass.control_result
        if (error := control_result.error()) is not None:
            raise error
        warning = warning_of(control_result, self._samples_ever_given)
        self._samples_ever_given = self._samples_ever_given or bool(control_result.samples_given)
        if warning is not None and not self._warned and self._collectives.rank == 0:
            self._warned = True
            warnings.warn(warning, stacklevel=2)

    def _add(self, number: int, there: bool = True) -> None:
        begun, parameter = self._pass, self.parameters[number]
        assert begun is not None, "a pass has begun"
        if there:
            self.times.record_ready(number)
        gradient = parameter.grad
        if isinstance(gradient, ScatteredGradient):  # the program has neither made a step nor cleared it
            gradient = gradient.clone() if there else None
        if not (self.rule.differs and begun.layout.updates is Updates.OUTSIDE):
            parameter.grad = None  # before it is added: an update may set another at once
        begun.add(number, gradient if begun.control_message.contributes or self.rule.differs else None)
        self._on_progress()

    def _on_reading_ended(self) -> None:
        """Advance the program: an update may wait for the input gradient, which has read the weights."""
        if self._pass is not None and not self._pass.ended:
            self._on_progress()

    def _on_progress(self) -> None:
        """Advance the program. The main thread does so where it has to run collectives itself."""
        if self._arrivals is not None:
            self._arrivals.put(True)
        else:
            began = time.perf_counter()
            self._advance_program()
            if self._programs.by_main:
                self.times.add_waiting(began)

    def _advance_program(self) -> None:
        """End each finished task of the outside program, which starts the tasks that follow it."""
        begun, cursor = self._pass, self._cursor
        assert begun is not None and cursor is not None, "a pass has begun"
        while (task := cursor.outside) is not None and _has_ended(task, begun, self._readings):
            cursor.end(begun.mark_submitted)

    def finalize(self) -> None:
        """End the backward pass: parameters without a gradient get none."""
        begun = self._pass
        assert begun is not None, "a pass has begun"
        self._add_postponed()
        for number in range(len(self.parameters)):
            if number not in begun.gradients:
                self._add(number, there=False)
        begun.ended = True
        self._readings.clear()
        self._on_progress()
        self._tuning.record_order(begun.order)
        self.times.begin()
        self.samples = self._first_dimension = None
        if self._arrivals is None:
            self._pass = None
            if not self._deferred:
                self.wait()
                self._set_placeholders(begun)

    def _set_placeholders(self, begun: BackwardPass) -> None:
        """Mark gradients that are in shards, until the optimizer's step: programs cannot read them."""
        if isinstance(begun, ShardedPass) and not self._stepping and not begun.discarded:
            for number, parameter in enumerate(self.parameters):
                parameter.grad = ScatteredGradient(parameter) if begun.has_gradient(number) else None

    def finish_step(self, stepped: bool = False) -> None:
        """Run the tasks that follow the step of the user's optimizer: it has been made (`stepped`), or left out.

        They average the weights, if the rule does so after this step, or update and gather shards.
        """
        cursor = self._cursor
        if cursor is None or cursor.outside is None or cursor.outside.operation not in (op.STEP_LOCAL, STEP):
            return
        if isinstance(self._last_pass, ShardedPass) and stepped and self.sharded_optimizer is not None:
            self._last_pass.step_with(self.sharded_optimizer.begin())
        cursor.end(lambda _: None)
        self.wait()

    def _finalize_if_open(self) -> None:
        """End a deferred backward pass that has returned, unless autograd has ended it."""
        if self._pass is not None and not self._pass.ended:
            self.finalize()

    def _run_beside_main(self, backward: Callable[[], Any]) -> None:
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
                self._advance_program()
            handle.wait()
            self.times.add_waiting(ended[0])
            self._pass = None
        finally:
            self._arrivals = None

    def state(self) -> dict[str, Any] | None:
        """Return the setting, for a run that resumes; None while it is being found."""
        state = self._tuning.state()
        return state if state is None else {**state, "rule": type(self.rule).__name__}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Adopt the setting of the run that is resumed, if it had as many ranks and the same options."""
        if state is None or not self._tuning.restore(state):
            return
        chosen = [one for one in self.rule.alternatives if type(one).__name__ == state.get("rule")]
        if chosen:
            self._adopt_rule(chosen[0])
        else:
            self._adopt_setting()

    def rule_state(self) -> dict[str, Any]:
        """Return the rule's memory of this rank and the place in its period, for a checkpoint; wait for exchanges."""
        self.wait()
        self._programs.player.wait_over_steps()
        kept, period = self._rule_state.segments(), None if self.rule.measures_period else self.rule.period
        return {"period": period, "cycle": list(self.rule.cycle), "first": self._programs.first, "kept": kept}

    def resume(self, step: int, rule_state: dict[str, Any] | None = None) -> None:
        """Continue after `step` steps, of which a rule's program depends on the number, with the state of this rank.

        Without a state, or where the rule has another period now, a period begins; then no change is in flight.
        """
        self._programs.number = step
        if rule_state is None:
            self._programs.first = step if self.rule.keeps_anchor else 0
            return
        if self.rule.measures_period and rule_state["period"] is not None:
            self._set_rule(self.rule.with_period(rule_state["period"]))
        same = list(self.rule.cycle) == rule_state["cycle"]
        self._programs.first = rule_state["first"] if same else step
        if self.rule.keeps_anchor:
            self._rule_state.load(rule_state["kept"] if same else without_changes(rule_state["kept"]))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Give the model, for an evaluation, the weights that all ranks have in common within the block, where theirs
        differ: the rule's anchor, or else their mean. Buffers are the mean of all ranks'."""
        self.wait()
        if not self.rule.differs:
            yield
            return
        model = self._model()
        buffers = () if model is None else model.buffers()
        averaged = [one.data for one in (*self.parameters, *buffers) if one.is_floating_point() or one.is_complex()]
        own = [one.clone() for one in averaged]
        has_anchor = self.rule.evaluates_anchor and self._rule_state.write_anchor()
        for one in averaged[len(self.parameters) if has_anchor else 0 :]:
            one.copy_(self._collectives.allreduce(one.div(self._collectives.size)))
        try:
            yield
        finally:
            for one, before in zip(averaged, own, strict=True):
                one.copy_(before)

    def log_with(self, log: Callable[[str], None]) -> None:
        """Report the choices of the first steps with `log`, on rank 0."""
        self._tuning.log = log
        buckets, wanted = len(self.memory.layout.buckets), self.rule.least_buckets
        if buckets < wanted and self._collectives.rank == 0:
            log(f"{buckets} of {wanted} fragments: the weights have {buckets} buckets; smaller ones give more")


def _has_ended(task: Task, begun: BackwardPass, readings: Readings) -> bool:
    """Return True where a task of the outside program has ended in a pass that has begun."""
    if task.operation is op.BACKWARD:
        return begun.is_full(task.key)  # key 0: a pass begins with its first gradient
    if task.operation is op.GRAD_INPUT:
        return readings.are_over(task.parameters)
    if task.operation is op.END:
        return begun.ended
    return task.operation in (op.BEGIN, op.FORWARD)


def _hook(reference: weakref.ref[Reducer], number: int) -> Callable[[torch.Tensor], None]:
    """Return the hook of a parameter. It keeps nothing alive: Python's collector does not see what holds hooks."""

    def complete(_: torch.Tensor) -> None:
        if (reducer := reference()) is not None:
            reducer.mark_ready(number)

    return complete
