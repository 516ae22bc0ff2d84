"""Training steps and evaluation of a model, on all ranks, and their times by kind and step.

A warm-up step before them times the algorithms of each convolution; the ranks take the best:

    rank 0   forward, backward on zeros: each algorithm timed ┐
    rank 1   forward, backward on zeros: each algorithm timed ┴ the slowest rank's time of each ─ the best, on all ranks

The ranks time them at the same time, since the time of an algorithm depends on how much memory the others read.
The step leaves no trace: gradients, the buffers of norms, and the memory of algorithms not chosen are reset. On an
accelerator there is none: its convolutions are those of PyTorch.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import numpy.typing as npt
import torch

from unisono.compute.convolution_plan import ConvolutionPlan, merge
from unisono.compute.prepare import StepContext, release_free_memory
from unisono.data.loading import Batch, cast_inputs
from unisono.data_parallel import attach, check_rule
from unisono.device import check_not_captured, device_of, is_on_host
from unisono.engine import weakly
from unisono.errors import TensorError, UsageError
from unisono.optimizers.layerwise import LayerwiseOptimizer
from unisono.reducer import reducer_of
from unisono.reducer.hooks import wait_on_access
from unisono.reducer.optimizer import wait_on_use
from unisono.reducer.virtual_ranks import copies_of_buffers, name_nondeterministic, restore_buffers
from unisono.rules import BaseRule
from unisono.step.rule import RankState
from unisono.tensor_parallel.model import check_split_optimizer, links_of
from unisono.training.accuracy import Accuracy, accuracy_of, blank_labels, classification_loss, count, loss_of_none
from unisono.training.timeline import Timeline
from unisono.transports.exact import Gradients
from unisono.world import World

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

SEQUENTIAL_KINDS = ("loading", "computing", "waiting")
"""Kinds of time that follow each other and add up to a rank's time."""

CONCURRENT_KINDS = ("communicating", "updating")
"""Kinds of time that overlap with those, or that the rank waits for."""

KINDS = (*SEQUENTIAL_KINDS, *CONCURRENT_KINDS)

MAX_STEPS_RECORDED = 1 << 18
"""Largest number of steps kept until `take_steps`; beyond it at least the newest half stays."""


class Trainer:
    """Trains `model` with `optimizer` under `rule` on the ranks of `world`.

    `loss` takes the model's output in training and the labels, and returns the mean over the samples; the default is
    cross entropy. `clip` is the largest norm of all averaged gradients. `within` returns the context in which the model
    computes (autocast). The model may be plain, or already parallel by `unisono.parallel`. `virtual_ranks` and their
    `threads` are those of `unisono.parallel`.

    Where the model is on a device, batches from the host are moved there.

    A step returns when its backward pass has ended. Exchanges and updates continue in the background. The next forward
    pass waits for each parameter when a module reads it, and so does code that reads parameters from the model. Call
    `wait` before you read tensors that you kept, or the optimizer. Steps of a compiled or scripted model wait for all.

    A model in evaluation mode is switched to training by a step, all its modules. In a model in training, modules that
    are in evaluation mode stay so (frozen batch norms), also when it was evaluated.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        world: World,
        rule: BaseRule,
        optimizer: torch.optim.Optimizer,
        loss: Loss = classification_loss,
        clip: float | None = None,
        timeline: Timeline | None = None,
        within: StepContext = nullcontext,
        virtual_ranks: int = 0,
        threads: int = 1,
    ) -> None:
        """Prepare the model on all ranks together. Raises TensorError on all of them for a model on several devices.

        Raises MismatchError on all of them for models on several kinds of device, UsageError for what is no rule, and
        for a `clip` that is not above 0.
        """
        check_rule(rule)
        if clip is not None and not clip > 0:
            raise UsageError(f"Trainer(clip={clip!r}): the norm must be above 0, or None")
        self.model, self.optimizer, self.world, self.loss = model, optimizer, world, loss
        self.device = world.call_on_all(lambda: device_of([*model.parameters(), *model.buffers()], "the model"))
        """Device of the model."""
        self.recorder = Recorder()
        self.reducer = reducer_of(model) or attach(model, world, rule, None, virtual_ranks, threads)
        self.reducer.structure.check(model)
        if not self.reducer.is_by(rule):
            raise UsageError(
                f"the model is parallel by {self.reducer.rule}, and the Trainer's rule is {rule}: give it the same "
                "one, or call unisono.parallel(model, world, rule) first"
            )
        virtual = self.reducer.programs.virtual
        if virtual_ranks not in (0, made := 0 if virtual is None else virtual.count):
            raise UsageError(
                f"Trainer(virtual_ranks={virtual_ranks}), but the model is parallel with virtual_ranks={made}: give "
                "the same to unisono.parallel"
            )
        check_split_optimizer(model, optimizer)
        self._clip, self._is_layerwise = clip, isinstance(optimizer, LayerwiseOptimizer)
        if self.reducer.traits.state is RankState.SHARDED:
            self.reducer.shard(optimizer, own_loop=False)
        wait_on_use(optimizer, weakly(self.reducer.runner.wait))
        self._exchanges = bool(links_of(model))  # a rank without samples calls the model, too
        self._awaits = wait_on_access(model, self.reducer.runner.wait_for, self.reducer.runner.wait_for_buffers)
        self._accounted = dict.fromkeys(("waiting", "communicating", "updating"), 0.0)
        self._timeline = timeline
        self.within = within
        """Function that returns the context in which the model computes."""
        if timeline is not None:
            self.reducer.observe = timeline.add

    def step(
        self, inputs: torch.Tensor, labels: torch.Tensor, whole: int | None = None, seed: int | None = None
    ) -> float | torch.Tensor:
        """Train on this rank's share of a batch, which may be empty. Return the sum of the loss over its samples.

        With virtual ranks, `whole` and `seed` are those of `unisono.shares`. On a device the sum is a tensor of one
        number, which is not waited for. Raises UsageError within `no_sync`, and after it: accumulate gradients in a
        loop of your own; and for a step that is captured as a graph; TensorError for a batch on another device than the
        model.
        """
        if self.reducer.accumulation.accumulates:
            raise UsageError(
                "a Trainer's step does not accumulate: call backward() under no_sync in a loop of your own"
            )
        if reducer_of(self.model) is not self.reducer:
            raise UsageError("the model was made parallel again, or its world was freed: make a new Trainer")
        check_not_captured(self.device)
        inputs, labels = self._moved(inputs), self._moved(labels)
        reducer, samples, began = self.reducer, len(labels), time.perf_counter()
        waited = reducer.times.waiting
        total: float | torch.Tensor = 0.0
        reducer.control.samples = float(samples)
        reducer.clip, reducer.programs.layer_norms = self._clip, self._is_layerwise  # those of several may differ
        if (virtual := reducer.programs.virtual) is not None:
            with name_nondeterministic():
                for share in virtual.passes(self.model, (inputs, labels), whole, seed, self._pass_without_samples):
                    total += self._pass(*share)
        elif samples or self._exchanges:
            total = self._pass(inputs, labels)
        else:
            self._pass_without_samples()
        if self._timeline is not None and reducer.programs.tuning.chosen is not None:
            self._timeline.begin_step(began, reducer.programs.tuning.chosen)  # a backward pass may begin with another
        if not self._awaits:
            reducer.runner.wait()
        self.recorder.add("computing", time.perf_counter() - began - (reducer.times.waiting - waited))
        self._account()
        self.recorder.end_step()
        return total

    def recompute(self, share: int, inputs: torch.Tensor, labels: torch.Tensor, seed: int) -> Gradients:
        """Return the gradients of a share of any rank in the step with this seed, by the weights as they are."""
        virtual = self.reducer.programs.virtual
        assert virtual is not None, "a share is that of virtual ranks"
        with name_nondeterministic(), self.recorder.record("computing"), self.span("recompute", "computing"):
            return virtual.recompute(self.model, (self._moved(inputs), self._moved(labels)), share, seed, self._pass)

    def _pass(self, inputs: torch.Tensor, labels: torch.Tensor) -> float | torch.Tensor:
        """Make a forward and a backward pass, which sums gradients unless more passes of the step follow. Return the
        sum of the loss."""
        reducer, samples = self.reducer, len(labels)
        if not self.model.training:
            self.model.train()
        with self.span("forward", "computing"), self.within():
            loss = self.loss(self.model(inputs), labels) if samples else loss_of_none(self.model, inputs)
        reducer.zero_grad()
        with self.span("backward", "computing"):
            if reducer.accumulation.averages:
                reducer.backward(loss.backward, self.optimizer)
            else:
                loss.backward()  # type: ignore[no-untyped-call]
        return (loss.item() if is_on_host(loss) else loss.detach()) * samples if samples else 0.0

    def _pass_without_samples(self) -> None:
        """Make the pass of a rank that has no samples, or none left."""
        self.reducer.zero_grad()
        self.reducer.backward(self.reducer.synchronize, self.optimizer)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of a batch on the model's device: a copy of one on the host."""
        if tensor.device == self.device:
            return tensor
        if not is_on_host(tensor):
            raise TensorError(f"the batch is on {tensor.device}, and the model on {self.device}: move one to the other")
        return tensor.to(self.device, non_blocking=True)

    def request(self, kind: str) -> None:
        """Request "save", "stop" or "copy" from all ranks, with the next control message.

        Signal handlers may call this.
        """
        self.reducer.control.request(kind)

    def requests(self) -> Mapping[str, str]:
        """Return the requests made before the last step and their origin ("rank 2", "3 ranks"): equal on all ranks."""
        return self.reducer.control.requests()

    def wait(self) -> None:
        """Wait until the last step's exchanges and updates are over."""
        self.reducer.runner.wait()
        self._account()

    def evaluate(self, batches: Iterable[Batch], labels: int) -> Accuracy:
        """Return the accuracy on `labels` labels; each rank evaluates its own `batches` of inputs and labels.

        Buffers are as the last step left them; floating-point ones are rank 0's. Where ranks' weights differ, their
        mean is evaluated.
        """
        with self.span("evaluation", "evaluation"):
            self.wait()
            with self.reducer.weights.averaged():
                counts = self.count_correct(batches)
            with self.recorder.record("waiting"):
                self.world.allreduce(counts)
        self.recorder.discard()
        return accuracy_of(counts, labels)

    def count_correct(self, batches: Iterable[Batch]) -> torch.Tensor:
        """Return the sum of `accuracy.count` over this rank's batches, float64, shape (4,)."""
        counts = torch.zeros(4, dtype=torch.float64)
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        for inputs, labels in self._together(batches):
            with self.recorder.record("computing"), self.span("evaluate", "computing"), torch.no_grad(), self.within():
                outputs = self.model(self._moved(inputs))
                counts = counts.to(self.device)
                counts += count(outputs, self._moved(labels)) if len(labels) else 0.0
        for module, mode in modes:
            module.training = mode
        return counts.cpu()

    def _together(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches; where layers are split, empty ones behind them until no rank has more."""
        if not self._exchanges:
            yield from batches
            return
        source, last = iter(batches), None
        while True:
            batch = next(source, None)
            left = self.world.allreduce(torch.tensor(int(batch is not None)), op="maximum")
            if not left:
                return
            last = batch or last
            if last is None:
                raise UsageError(f"rank {self.world.rank} has no test samples, and split layers need its calls")
            yield batch or (last[0][:0], last[1][:0])

    def awaited(self, batches: Iterator[Batch], dtype: torch.dtype) -> Iterator[Batch]:
        """Yield the batches with inputs of `dtype`; integers stay. The time until each is there counts as loading."""
        while True:
            with self.recorder.record("loading"), self.span("wait for data", "waiting"):
                batch = next(batches, None)
                if batch is None:
                    return
                batch = cast_inputs(batch[0], dtype), batch[1]
            yield batch

    def span(self, name: str, kind: str) -> AbstractContextManager[None]:
        """Return a context that records its block in the timeline, if there is one."""
        return nullcontext() if self._timeline is None else self._timeline.span(name, kind)

    def _account(self) -> None:
        """Record the time of exchanges, updates and waits since the last call: some end between two steps."""
        measured = self.reducer.times
        for kind in self._accounted:
            now = getattr(measured, kind)
            self.recorder.add(kind, now - self._accounted[kind])
            self._accounted[kind] = now


def warm_up(
    model: torch.nn.Module, inputs: torch.Tensor, plan: ConvolutionPlan, world: World, within: StepContext
) -> None:
    """Settle `plan` on all ranks of `world` by a step of `model`, of which nothing stays, on this rank's inputs.
    Collective."""
    if len(inputs):
        buffers = copies_of_buffers(model)
        if not model.training:
            model.train()
        with within():
            scores = model(inputs)
            loss = classification_loss(scores, blank_labels(scores))
        loss.backward()  # type: ignore[no-untyped-call]
        restore_buffers(buffers)
        model.zero_grad(set_to_none=True)
        release_free_memory()
    plan.freeze(merge(world.all_gather_object(plan.measured)))


def seed_of_step(seed: int, step: int, rank: int) -> int:
    """Return the seed of the random numbers of a rank's step."""
    return int(np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)[0] >> 1)


class Recorder:
    """Seconds of this rank, by kind.

    loading         making the next batch
    computing       forward, backward, and counting correct predictions
    waiting         for an exchange, an update or another rank, without computing
    communicating   exchanges, also while the rank computes
    updating        the optimizer
    """

    def __init__(self) -> None:
        self._now = dict.fromkeys(KINDS, 0.0)
        self._all = dict.fromkeys(KINDS, 0.0)
        self._steps = array("f")

    @contextmanager
    def record(self, kind: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(kind, time.perf_counter() - start)

    def add(self, kind: str, seconds: float) -> None:
        self._now[kind] += seconds
        self._all[kind] += seconds

    def end_step(self) -> None:
        """End a step: it gets all time recorded since the last step."""
        if len(self._steps) >= MAX_STEPS_RECORDED * len(KINDS):
            del self._steps[: MAX_STEPS_RECORDED // 2 * len(KINDS)]
        self._steps.extend(self._now[kind] for kind in KINDS)
        self._now = dict.fromkeys(KINDS, 0.0)

    def discard(self) -> None:
        """Assign the time recorded since the last step to no step."""
        self._now = dict.fromkeys(KINDS, 0.0)

    def take_steps(self) -> npt.NDArray[np.float32]:
        """Return the seconds of the steps since the last call, float32, of shape (steps, kinds)."""
        taken, self._steps = self._steps, array("f")
        return np.array(taken, np.float32).reshape(-1, len(KINDS))

    def split(self) -> dict[str, float]:
        """Return the seconds of each kind since the start."""
        return dict(self._all)
