"""Reducer of a model's gradients: autograd's hooks become the events of the rule's step program, which runs meanwhile.

    backward      w3       w2       w1       w0
    hooks         mark_ready 3, 2   │ mark_ready 1, 0 │
    program       backward 1 ended ─┘  backward 2 ────┴ ended
    engine        pack 1, allreduce 1, set_grads 1, update 1 ...   the tasks that follow (`step/play.py`)

Its parts, each of which has its own state:

    memory       buckets that gradients are sent from                           `bucket_memory.py`
    programs     step programs, by the setting that all ranks have chosen       `programs.py`, `tuning.py`
    runner       backward passes, and waits for what they have begun            `backward_pass.py`, `replica.py`
    control      samples and requests of this rank, and what all ranks said     `control.py`
    sharded      the user's optimizer, where its state is in shards             `optimizer.py`

Beside them are gradients between averages (`accumulation.py`), and weights outside of steps (`weights.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from unisono.asynchronous.exchange import WorkerExchange
from unisono.asynchronous.link import ServerLinks
from unisono.device import check_not_captured
from unisono.engine import OperationSpan, weakly
from unisono.engine.communicator_pool import CommunicatorPool, ModelCollectives
from unisono.errors import UnisonoError, UsageError
from unisono.optimizers.layerwise import LayerwiseOptimizer
from unisono.optimizers.sharded import ShardedStep, is_inner_step
from unisono.reducer.accumulation import Accumulation
from unisono.reducer.backward_pass import BackwardPass, PassRunner
from unisono.reducer.bucket_memory import BucketMemory
from unisono.reducer.buffers import Buffers
from unisono.reducer.control import ControlMessage, StepControl
from unisono.reducer.hooks import ATTRIBUTE, LIVING, BackwardEndCallback, attach, check_kept, reducer_of, register_hooks
from unisono.reducer.optimizer import ShardedOptimizer, SplitStep, check_known
from unisono.reducer.parameter_parts import UNSPLIT, ParameterParts
from unisono.reducer.programs import Programs
from unisono.reducer.replica import ModelReplica, ShardedReplica
from unisono.reducer.scattered_gradient import clear
from unisono.reducer.structure import Structure
from unisono.reducer.tuning import StepTimes
from unisono.reducer.virtual_ranks import VirtualRanks
from unisono.reducer.weights import ModelWeights
from unisono.rules import BaseRule
from unisono.rules.asynchronous import has_servers
from unisono.step.build import CONTROL
from unisono.step.layout import Layout, Updates
from unisono.step.rule import RankState
from unisono.transports.exact import ExactSums
from unisono.wires import EXACT
from unisono.world import World


class Reducer:
    """Gradients of a model on one rank, and their combination with those of the other ranks by a rule."""

    def __init__(
        self,
        model: torch.nn.Module,
        world: World,
        rule: BaseRule,
        parts: ParameterParts = UNSPLIT,
        virtual_ranks: int = 0,
    ) -> None:
        """Attach to `model`, of whose parameters `parts` are split. Called by all ranks of `world` together. Each
        computes its shares of `virtual_ranks`; 0: each is one."""
        self._model, self.structure, size = weakref.ref(model), Structure(model), world.size
        self.rule, self.traits = rule, rule.traits
        self.parameters, self.times = self.structure.parameters, StepTimes(len(self.structure.parameters))
        self.observe: Callable[[OperationSpan], None] = lambda _: None
        """Called with the span of each operation that the engine runs."""
        self.buffers = Buffers(model)
        self.exchange: WorkerExchange | None = None
        """This worker's end of its exchanges, where the rule is asynchronous."""
        self.clip: float | None = None
        """Largest norm of all gradients together, where the optimizer's updates are in the program."""
        self._step: SplitStep | ShardedStep | None = None  # that applies the gradients of the pass that runs
        self._prepared = False  # whether the setting of the coming backward pass has been asked for
        pool = world.resource(CommunicatorPool)
        collectives = ModelCollectives(pool, f"model {next(pool.numbers)}")
        holders = {count: pool.part_worlds(partition, 1)[1][0] for count, partition in parts.holders.items()}
        self.memory = memory = collectives.call(lambda world: BucketMemory(self.parameters, world, parts, holders))
        self.accumulation = Accumulation(memory, float(size) if self.traits.sums else 1.0)
        self.links = ServerLinks(rule, world, collectives.call(World.dup).comm) if has_servers(rule) else None
        """Links to the servers of an asynchronous rule."""
        observe = weakly(self._observe)
        self.programs = programs = Programs(rule, memory, self.buffers, collectives, self.times, observe, self.links)
        self.control = StepControl(world.rank, size, lambda: programs.player.wait(CONTROL))
        if rule.exchange.wire == EXACT:
            programs.exact = ExactSums(virtual_ranks or size, memory.sums, memory.pieces, memory.in_order)
        if virtual_ranks:
            state = self.accumulation, self.control, self.parameters
            programs.virtual = VirtualRanks(virtual_ranks, world.rank, size, *state)
        self.runner = PassRunner(programs, self.control, self.structure.names)
        self.sharded: ShardedOptimizer | None = None
        """Optimizer whose state is in shards, where the rule is sharded and `shard` was called."""
        self.weights = ModelWeights(model, programs, self.runner.wait)
        self._followed: Callable[[], torch.optim.Optimizer | None] = lambda: None  # optimizer of a user's own loop
        self._steps: list[RemovableHandle] = []  # hooks of it
        self._hooks = register_hooks(self.parameters, self.mark_ready)
        # hooks of the nodes that add to `.grad` run in `backward()` alone, those of a tensor in `autograd.grad` too;
        # autograd forgets a node that nobody holds, with its hooks
        self._adding = [get_gradient_edge(parameter).node for parameter in self.parameters] if self.traits.sums else []
        for index, node in enumerate(self._adding):
            self._hooks.append(node.register_prehook(partial(weakly(self.before_adding), index)))
        self._hooks.append(attach(model, self))
        LIVING.add(self)
        pool.register(self)

    def loss_weight(self) -> tuple[int, float]:
        """Return the number of averages so far, and the weight of this rank's loss in the next one among those of its
        group, of whose samples layers make gradients: its samples, or 1 where ranks count alike."""
        samples = self.control.samples
        if samples is None or (samples and self.traits.sums):
            samples = 1.0
        return self.control.averages, samples

    def on_forward(self, first: torch.Tensor | None) -> None:
        """Record a forward pass and its first input. Raises UsageError for one that is captured as a graph."""
        self._refuse_capture()
        if self.control.record_input(first):
            self.times.begin()

    def backward(self, backward: Callable[[], Any], optimizer: torch.optim.Optimizer) -> None:
        """Run a backward pass whose gradients the optimizer's step applies. A step in parts returns before all are
        applied: wait for all (`runner.wait`), or for each parameter that is read (`runner.wait_for`). Raises UsageError
        for a trainable parameter of the optimizer that is not the model's, and in shards for hooks."""

        def run() -> None:
            backward()
            if self.runner.current is not None and not self.runner.current.ended:  # autograd has not ended it
                self.finalize()

        self._step = SplitStep(optimizer, self.structure) if self.sharded is None else self.sharded.begin()
        try:
            self.prepare_for_backward()
            if self.programs.overlap.beside_main:
                self.runner.run_beside_main(run)
            else:
                run()
            if self._updates() is Updates.WHOLE:
                self.runner.wait()
        except BaseException:  # also after an interrupt the next pass must not find this one half done
            self._discard(self.runner.current)
            raise
        finally:
            self._step = None

    def synchronize(self) -> None:
        """Average the gradients over all ranks. A rank that has no backward pass in a step calls this in its place.

        It contributes what it has accumulated since the last average. Without that and without samples its weight is 0.
        """
        self.accumulation.forget_replaced()
        begun = self._begin(absent=self.control.samples is None and not self.accumulation.has_gradients())
        try:
            self.finalize()
        except BaseException:  # as above
            self._discard(begun)
            raise

    def zero_grad(self) -> None:
        """Wait for pending work and clear all gradients: the next backward pass makes new ones."""
        self.runner.wait()
        for parameter in self.parameters:
            parameter.grad = None

    def finish(self) -> None:
        """Wait for pending work before the program ends or memory is freed; print an error of it to stderr."""
        self.runner.finish()

    def release(self) -> None:
        """Detach from the model, which behaves like any other from here on."""
        self.finish()
        for handle in (*self._hooks, *self._steps):
            handle.remove()
        if self.sharded is not None:
            self.sharded.release()
            clear(self.parameters)
        for held in (self._hooks, self._steps, self._adding):
            held.clear()
        LIVING.discard(self)
        if (model := self._model()) is not None and reducer_of(model) is self:
            delattr(model, ATTRIBUTE)

    def restore(self, state: dict[str, Any] | None) -> None:
        """Adopt the setting of a run that is resumed (`tuning.state`), if it had as many ranks and the same options."""
        if self.programs.restore(state) and self.sharded is not None:
            self.sharded.lay_out()

    def shard(self, optimizer: torch.optim.Optimizer, own_loop: bool) -> None:
        """Let the optimizer keep the state of this rank's shards alone. Called by all ranks together.

        With `own_loop` its step is made when the program calls it. Raises UsageError for an optimizer that cannot be
        stepped in shards.
        """
        if self.sharded is not None:
            if self.sharded.optimizer is optimizer:
                return
            self.runner.wait()
            self.sharded.release()
        self.sharded = ShardedOptimizer(optimizer, self.programs, self.runner, self.structure.names, own_loop)

    def give_back(self) -> None:
        """Leave the optimizer, if it is in shards, with its whole state. Called by all ranks together."""
        if self.sharded is not None:
            self.runner.finish_step()
            self.sharded.give_back()
            self.sharded = None
            clear(self.parameters)

    def rule_state(self) -> dict[str, Any]:
        """Return the rule's memory of this rank and the place in its period, for a checkpoint; wait for exchanges."""
        self.runner.wait_for_all()
        return self.programs.rule_state()

    def prepare_for_backward(self) -> None:
        """Adopt a new setting, if there is one. A backward pass is about to begin, or has just begun."""
        self.runner.wait()
        if self.programs.next_step(self._step is not None) and self.sharded is not None:
            self.sharded.lay_out()
            if self._step is not None:
                self._step = self.sharded.begin()
        self._prepared = True

    def before_adding(self, index: int, gradients: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        """Make room for a gradient beside the sum of an earlier pass. Without samples it counts as zero there."""
        contributes = self.control.samples != 0 or self.memory.parts.of(index) > 1
        share_alone = self.accumulation.take_share(index, contributes)
        return tuple(map(torch.zeros_like, gradients)) if share_alone else None

    def mark_ready(self, index: int, last: bool) -> None:
        """Add a parameter's complete gradient; it is not the `last` hook where some of the program's own follow. Raises
        UsageError for a sparse gradient, and for one with a graph that an exchange would cut."""
        parameter = self.parameters[index]
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise UsageError(
                f"parameter {self.structure.names[index]} has a sparse gradient, which unisono.parallel does not "
                "average: make its module with sparse=False"
            )
        if not self.accumulation.averages:
            self.accumulation.accumulated = True
            return
        if (begun := self.runner.current) is None:
            begun = self._begin()
            if self._step is None:
                Variable._execution_engine.queue_callback(
                    BackwardEndCallback(self.finalize, partial(self._discard, begun))
                )
        if begun.releases and parameter.grad is not None and parameter.grad.requires_grad:
            raise UsageError(
                f"parameter {self.structure.names[index]} has a gradient with a graph, which its exchange would "
                "cut, as by backward(create_graph=True): use torch.autograd.grad(..., create_graph=True), whose "
                "gradients are this rank's own"
            )
        begun.mark_ready(index, last)

    def finalize(self) -> None:
        """End the backward pass: parameters without a gradient get none."""
        begun = self.runner.end_backward()
        self.programs.tuning.recorded_order = begun.order
        self.times.begin()
        self.control.end_pass()
        if self._step is None:
            self.runner.wait()
            if self.sharded is not None:
                self.sharded.hide_gradients(begun.replica)
            self.accumulation.end_average()

    def takes(self, model: torch.nn.Module, world: World, rule: BaseRule, optimizer: torch.optim.Optimizer) -> bool:
        """Return True for an optimizer that is to take the place of another, by the same rule on the same ranks."""
        before = self.sharded.optimizer if self.sharded is not None else self._followed()
        as_before = self.is_by(rule) and world.resource(CommunicatorPool) is self.programs.collectives.pool
        return as_before and optimizer is not before and not self.structure.differs(model)

    def is_by(self, rule: BaseRule) -> bool:
        """Return True for the rule of this reducer, also as it was before virtual ranks made its wire exact."""
        if self.programs.virtual is None or self.rule == rule:  # a rule without virtual ranks may refuse a wire
            return self.rule == rule
        return self.rule == replace(rule, exchange=replace(rule.exchange, wire=EXACT))

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Call `begin_step` before each step of the optimizer of a user's own loop, and `end_step` after it. One that
        was followed before is no longer."""
        while self._steps:
            self._steps.pop().remove()
        self._followed = weakref.ref(optimizer)
        begin_step, end_step = weakly(self.begin_step, check_kept), weakly(self.end_step)
        eagerly: Callable[[Any], Any] = torch.compiler.disable  # also where the step is compiled
        before = eagerly(lambda stepped, *_: begin_step(stepped))
        after = eagerly(lambda stepped, *_: None if is_inner_step(stepped) else end_step())
        self._steps += [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]

    def complete_norms(self, optimizer: LayerwiseOptimizer) -> None:
        """Let the next step in a user's own loop of an optimizer with parts of layers have the norms of whole ones."""
        if self._step is None and self.sharded is None:
            eagerly: Callable[[Any], Any] = torch.compiler.disable  # also where the step is compiled
            memory, collectives = self.memory, self.programs.collectives
            sum_norms = partial(eagerly(memory.parts.sum_norms), memory.parameters, collectives)
            optimizer.sums = {**optimizer.sums, self._model: sum_norms}

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep the weights that the ranks have in common, before this rank's step changes its own: it may be the first
        one, without a backward pass that averages. Raises UsageError for a trainable parameter of no parallel model."""
        if self._step is None:
            if self.traits.state.differs:
                check_known(optimizer, {id(parameter) for reducer in LIVING for parameter in reducer.parameters})
            self.programs.lay_out_memory()

    def end_step(self) -> None:
        """Run the tasks that follow a step of the user's optimizer. A period counts steps, also one without a backward
        pass. A Trainer's program makes the step and runs what follows."""
        if self._step is not None:
            return
        if self.traits.state.differs and not self.runner.awaits_step:
            self.synchronize()
        try:
            self.runner.finish_step()
        except UnisonoError as error:
            if self.traits.state.differs:
                error.add_note(
                    f"{type(self.rule).__name__} counts the calls of optimizer.step(): a rank that has left one out is "
                    "behind the others; in its place, call optimizer.zero_grad() and then optimizer.step(), which "
                    "changes nothing"
                )
            raise

    def _begin(self, absent: bool = False) -> BackwardPass:
        """Begin a pass, when its first gradient is ready, or when the rank has none."""
        self._refuse_capture()
        if self.programs.virtual is not None and self.control.samples is None:
            raise UsageError(
                "virtual ranks: each share of unisono.shares has one backward pass that sums, and this is another: add "
                "the losses, make all passes of a share but the last under unisono.no_sync(model), and checkpoint "
                "activations with use_reentrant=False"
            )
        self.structure.check_pass(self._model())
        self.memory.free_buckets()
        if not self.traits.state.differs:
            self.runner.finish_step()  # if the program has left it out, as the other ranks gather weights
        elif self.runner.awaits_step:  # another pass of the same step, with the same setting
            self.programs.step -= 1  # it has exchanged nothing
            self._prepared = True
        if not self._prepared:
            self.prepare_for_backward()
        self._prepared = self.accumulation.accumulated = False
        changes = self.accumulation.begin_pass()
        compares = self.traits.state is RankState.WHOLE and not absent and self._step is None
        message = self.control.begin(absent, changes if compares else None)
        layout, program = self.programs.next(self._updates(), self.clip)
        replica = self._replica_of(layout, message)
        begun = BackwardPass(replica, program, self.programs, self.accumulation, self.runner.arrivals)
        self.runner.current = self.runner.last = begun
        return begun

    def _refuse_capture(self) -> None:
        for parameter in self.parameters[:1]:
            check_not_captured(parameter.device)

    def _updates(self) -> Updates:
        """Return how the gradients of the pass that runs are applied."""
        if self._step is None:
            return Updates.OUTSIDE
        return self._step.updates if isinstance(self._step, SplitStep) else Updates.PARTS

    def _replica_of(self, layout: Layout, message: ControlMessage) -> ModelReplica:
        """Return what the tasks of a pass act on. Raises UsageError where a sharded rule has no optimizer."""
        step = self._step
        if self.traits.state is RankState.SHARDED:
            if self.sharded is None:
                raise UsageError(f"{type(self.rule).__name__} needs the optimizer: call Reducer.shard(optimizer)")
            assert not isinstance(step, SplitStep), "the step is that of `sharded`"
            return ShardedReplica(self.programs, layout, message, step)
        assert not isinstance(step, ShardedStep), "only sharded rules have such steps"
        replica = ModelReplica(self.programs, layout, message, None if step is None else step.update)
        replica.exchange = self.exchange
        return replica

    def _discard(self, begun: BackwardPass | None) -> None:
        """Discard a backward pass that has failed."""
        newest = self.runner.discard(begun)
        self.control.discard(None if begun is None else begun.replica.message, newest)
        awaits_step = begun is not None and begun.replica.layout.updates is Updates.OUTSIDE
        if newest and awaits_step and self.traits.state.differs:  # a period counts steps, and none was made
            self.programs.step, self._prepared = self.programs.step - 1, True  # the search counts it once, too

    def _observe(self, span: OperationSpan) -> None:
        self.times.observe(span)
        self.observe(span)
