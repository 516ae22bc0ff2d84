"""Training loops as people write them, each a function that runs in parallel and by hand.

A loop is a generator: it yields, after each call of an optimizer's `step`, the models whose weights that has changed.
So a run by hand can average p models there. `Run.loss` is this rank's loss in a parallel run, and that of all samples
in a serial one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import unisono
from unisono.rules import BaseRule
from unisono.world import World

STEPS = 7
"""Iterations of each loop: not a multiple of the period of a rule, which therefore ends in the middle of one."""

SAMPLES = 3
"""Samples of a rank in an iteration."""

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": partial(torch.optim.Adam, lr=0.02, weight_decay=0.01),
}

Loop = Callable[["Run"], Iterator[Sequence[nn.Module]]]


class Run:
    """Run of a loop: on one rank of a world, or by hand, without a world, on the samples of some ranks."""

    def __init__(
        self,
        ranks: int,
        members: Sequence[int],
        optimizer: str,
        rule: BaseRule,
        world: World | None = None,
        plan: Mapping[str, str] | None = None,
    ) -> None:
        """`members`: the ranks whose samples the run trains on, of all `ranks` that have samples of their own."""
        self.ranks, self.members, self.rule, self._world, self._plan = ranks, members, rule, world, plan
        self._make_optimizer = OPTIMIZERS[optimizer]
        self.summed = getattr(rule, "scale", "mean") == "sum"
        self.models: list[nn.Module] = []
        self.starts: list[list[Tensor]] = []
        """Weights of each model before the first step."""
        self.optimizers: list[torch.optim.Optimizer] = []
        self.last = ranks - 1 if ranks > 1 else None
        """Rank that does something else than the others in some loops; none where it is alone."""

    @property
    def is_last(self) -> bool:
        return self.members == [self.last]

    def network(self, *sizes: int, seed: int = 0) -> nn.Module:
        """Three layers, so that the gradient of the first needs weights that the forward pass has saved."""
        torch.manual_seed(seed)
        sizes = sizes or (4, 6, 5, 2)
        layers = [nn.Linear(before, after) for before, after in pairwise(sizes)]
        return nn.Sequential(*(module for layer in layers for module in (layer, nn.Tanh()))).double()

    def optimizer(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        self.optimizers.append(self._make_optimizer(list(parameters)))
        return self.optimizers[-1]

    def parallel(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        """Make a model parallel. One of a run by hand stays as it is."""
        self.models.append(model)
        self.starts.append([parameter.detach().clone() for parameter in model.parameters()])
        if self._world is not None:
            unisono.parallel(model, self._world, self.rule, optimizer, self._plan)
        return model

    def setup(self, model: nn.Module | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return a parallel model with an optimizer of all its parameters."""
        model = self.network() if model is None else model
        optimizer = self.optimizer(model.parameters())
        return self.parallel(model, optimizer), optimizer

    def loss(self, step: int, function: Callable[[Tensor], Tensor], without: int | None = None) -> Tensor:
        """Return the loss of an iteration's samples, combined as the rule combines gradients, without those of a
        rank."""
        members = [rank for rank in self.members if rank != without]
        values = torch.stack([function(samples(step, rank)) for rank in members])
        return values.sum() if self.summed else values.mean()

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext() if self._world is None else unisono.no_sync(model)

    def mean(self, loss: Tensor) -> Tensor:
        """Return the loss of all ranks' samples, where their weights are the same."""
        if self._world is None or self.rule.traits.state.differs:
            return loss
        total = loss.detach().clone().reshape(1)
        self._world.allreduce(total)
        return total if self.summed else total / self.ranks

    def synchronize(self, model: nn.Module) -> None:
        if self._world is not None:
            unisono.synchronize(model)


def samples(step: int, rank: int, width: int = 4) -> Tensor:
    """Return the samples of a rank in an iteration."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(SAMPLES, width, generator=generator, dtype=torch.float64)


def square(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda inputs: model(inputs).add(0.5).pow(2).mean()


def sine(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda inputs: model(inputs.cos()).sin().mean()


def plain(run: Run) -> Iterator[Sequence[nn.Module]]:
    """One backward pass, then a step."""
    model, optimizer = run.setup()
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(step, square(model)).backward()
        optimizer.step()
        yield [model]


def zero_grad_after_forward(run: Run) -> Iterator[Sequence[nn.Module]]:
    """`zero_grad()` between the forward and the backward pass."""
    model, optimizer = run.setup()
    for step in range(STEPS):
        loss = run.loss(step, square(model))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield [model]


def accumulated(run: Run) -> Iterator[Sequence[nn.Module]]:
    """Several backward passes before a step, as in a script of one process."""
    model, optimizer = run.setup()
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(3):
            run.loss(10 * step + part, square(model)).div(3).backward()
        optimizer.step()
        yield [model]


def accumulated_under_no_sync(run: Run) -> Iterator[Sequence[nn.Module]]:
    """The same under `unisono.no_sync`, but for the last pass."""
    model, optimizer = run.setup()
    for step in range(STEPS):
        optimizer.zero_grad()
        with run.no_sync(model):
            for part in range(2):
                run.loss(10 * step + part, square(model)).div(3).backward()
        run.loss(10 * step + 2, square(model)).div(3).backward()
        optimizer.step()
        yield [model]


def accumulated_both_ways(run: Run) -> Iterator[Sequence[nn.Module]]:
    """A pass that averages, one under `unisono.no_sync`, and one that averages, before a step."""
    model, optimizer = run.setup()
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(10 * step, square(model)).backward()
        with run.no_sync(model):
            run.loss(10 * step + 1, sine(model[0])).backward()
        run.loss(10 * step + 2, square(model)).backward()
        optimizer.step()
        yield [model]


def accumulated_unevenly(run: Run) -> Iterator[Sequence[nn.Module]]:
    """Fewer backward passes before a step on one rank."""
    model, optimizer = run.setup()
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(2 if run.is_last else 3):
            run.loss(10 * step + part, square(model)).backward()
        optimizer.step()
        yield [model]


def forwards_before_backwards(run: Run) -> Iterator[Sequence[nn.Module]]:
    """Two forward passes, then their backward passes."""
    model, optimizer = run.setup()
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [run.loss(10 * step + part, square(model)) for part in range(2)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        yield [model]


def one_graph_twice(run: Run) -> Iterator[Sequence[nn.Module]]:
    """Two losses of one forward pass, each with a backward pass of its own."""
    model, optimizer = run.setup()
    for step in range(STEPS):
        optimizer.zero_grad()
        outputs = [model(samples(step, rank)) for rank in run.members]
        run.loss(step, _next(outputs, 2)).backward(retain_graph=True)
        run.loss(step, _next(outputs, 3)).backward()
        optimizer.step()
        yield [model]


def _next(outputs: Sequence[Tensor], power: int) -> Callable[[Tensor], Tensor]:
    rest = iter(outputs)
    return lambda _: next(rest).pow(power).mean()


def disjoint(run: Run) -> Iterator[Sequence[nn.Module]]:
    """Two towers with a loss each: backward passes on different parameters."""
    towers = nn.ModuleDict({"a": run.network(), "b": run.network(4, 3, seed=1)})
    model, optimizer = run.setup(towers)
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(step, square(towers["a"])).backward()
        run.loss(step, sine(towers["b"])).backward()
        optimizer.step()
        yield [model]


def overlapping(run: Run) -> Iterator[Sequence[nn.Module]]:
    """Two heads with a loss each behind one body: backward passes that share parameters."""
    parts = nn.ModuleDict({"body": run.network(), "a": run.network(2, 3, seed=1), "b": run.network(2, 2, seed=2)})
    model, optimizer = run.setup(parts)
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(step, lambda inputs: parts["a"](parts["body"](inputs)).pow(2).mean()).backward()
        run.loss(step, lambda inputs: parts["b"](parts["body"](inputs)).sin().mean()).backward()
        optimizer.step()
        yield [model]


def some_gradients_removed(run: Run) -> Iterator[Sequence[nn.Module]]:
    """`.grad = None` for the last layer in some steps, as DINO and SwAV do."""
    model, optimizer = run.setup()
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(step, square(model)).backward()
        if step in (0, 1, 4):
            for parameter in model[-2].parameters():
                parameter.grad = None
        optimizer.step()
        yield [model]


def gradients_replaced(run: Run) -> Iterator[Sequence[nn.Module]]:
    """`.grad` replaced by one's own, made of the gradients of two losses, as PCGrad does."""
    model, optimizer = run.setup()
    for step in range(STEPS):
        gradients = []
        for loss in (square(model), sine(model)):
            optimizer.zero_grad()
            run.loss(step, loss).backward()
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        for parameter, first, second in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = first + second - torch.minimum(first, second)
        optimizer.step()
        yield [model]


def gradients_by_autograd_grad(run: Run) -> Iterator[Sequence[nn.Module]]:
    """`torch.autograd.grad`, then `.grad` set by the program, then `unisono.synchronize`."""
    model, optimizer = run.setup()
    for step in range(STEPS):
        gradients = torch.autograd.grad(run.loss(step, square(model)), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        run.synchronize(model)
        optimizer.step()
        yield [model]


def gradients_of_a_copy(run: Run) -> Iterator[Sequence[nn.Module]]:
    """`.grad` set to those of a copy of the model, then `unisono.synchronize`."""
    model, optimizer = run.setup()
    for step in range(STEPS):
        other = copy.deepcopy(model)
        run.loss(step, square(other)).backward()
        for parameter, trained in zip(model.parameters(), other.parameters(), strict=True):
            parameter.grad = trained.grad
        run.synchronize(model)
        optimizer.step()
        yield [model]


def gradients_between(run: Run) -> Iterator[Sequence[nn.Module]]:
    """`torch.autograd.grad` of a second loss between `backward()` and the step, as GradNorm does."""
    model, optimizer = run.setup()
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(step, square(model)).backward()
        torch.autograd.grad(run.loss(step, sine(model)), list(model.parameters()))
        optimizer.step()
        yield [model]


def gradients_clipped(run: Run) -> Iterator[Sequence[nn.Module]]:
    """`clip_grad_norm_` before the step."""
    model, optimizer = run.setup()
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(step, square(model)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        yield [model]


def gradients_with_noise(run: Run) -> Iterator[Sequence[nn.Module]]:
    """`.grad` scaled in place, with noise added, the same on all ranks."""
    model, optimizer = run.setup()
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(step, square(model)).backward()
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad.mul_(0.5).add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        optimizer.step()
        yield [model]


def gradient_penalty(run: Run) -> Iterator[Sequence[nn.Module]]:
    """A loss on the gradient of the inputs (`create_graph=True`)."""
    model, optimizer = run.setup()

    def penalized(inputs: Tensor) -> Tensor:
        inputs = inputs.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        return model(inputs).add(0.5).pow(2).mean() + gradient.pow(2).mean()

    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(step, penalized).backward()
        optimizer.step()
        yield [model]


def weights_of_a_function(run: Run) -> Iterator[Sequence[nn.Module]]:
    """`torch.func.functional_call` with weights after an inner step, as MAML does."""
    model, optimizer = run.setup()

    def loss(inputs: Tensor) -> Tensor:
        weights = dict(model.named_parameters())
        gradients = torch.autograd.grad(square(model)(inputs), list(weights.values()), create_graph=True)
        fast = {name: weight - 0.1 * its for (name, weight), its in zip(weights.items(), gradients, strict=True)}
        return torch.func.functional_call(model, fast, (inputs.cos(),)).add(0.5).pow(2).mean()

    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(step, loss).backward()
        optimizer.step()
        yield [model]


def perturbed(run: Run) -> Iterator[Sequence[nn.Module]]:
    """Weights that are changed for a second backward pass, then restored, before the step, as SAM does."""
    model, optimizer = run.setup()
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(step, square(model)).backward()
        changes = [0.05 * parameter.grad for parameter in model.parameters()]
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), changes)
        optimizer.zero_grad()
        run.loss(step, square(model)).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), changes)
        optimizer.step()
        yield [model]


def weights_restored_on_one(run: Run) -> Iterator[Sequence[nn.Module]]:
    """An evaluation on one rank: other weights are loaded there, then the model's own again."""
    model, optimizer = run.setup()
    start = copy.deepcopy(model.state_dict())
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(step, square(model)).backward()
        if step not in (1, 2):
            optimizer.step()
            yield [model]
        if run.is_last:
            own = copy.deepcopy(model.state_dict())
            model.load_state_dict(start)
            model.load_state_dict(own)


def weights_loaded_on_one(run: Run) -> Iterator[Sequence[nn.Module]]:
    """Weights that are loaded on one rank alone, after a step of all."""
    model, optimizer = run.setup()
    start = copy.deepcopy(model.state_dict())
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(step, square(model)).backward()
        optimizer.step()
        yield [model]
        if run.is_last and step in (1, 2):
            model.load_state_dict(start)


def stepped_twice_by_one(run: Run) -> Iterator[Sequence[nn.Module]]:
    """A second `step()` on one rank, which all make up for at the end."""
    model, optimizer = run.setup()
    for step in range(STEPS - run.is_last):
        optimizer.zero_grad()
        run.loss(step, square(model)).backward()
        for _ in range(2 if run.is_last and step == 2 else 1):
            optimizer.step()
            yield [model]


def stepped_in_backward(run: Run) -> Iterator[Sequence[nn.Module]]:
    """`step()` in a hook of each parameter, while `backward()` runs."""
    model, _ = run.setup()
    for parameter in model.parameters():
        its = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, its=its: its.step())
    run.loss(0, square(model)).backward()
    yield [model]


def dropped_without_step(run: Run) -> Iterator[Sequence[nn.Module]]:
    """A batch that all ranks drop: `zero_grad()`, and no step."""
    model, optimizer = run.setup()
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(step, square(model)).backward()
        if step in (1, 3):
            optimizer.zero_grad()
            continue
        optimizer.step()
        yield [model]


def dropped_with_step(run: Run) -> Iterator[Sequence[nn.Module]]:
    """A batch that all ranks drop: `zero_grad()`, and a step that changes nothing."""
    model, optimizer = run.setup()
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(step, square(model)).backward()
        if step in (1, 3):
            optimizer.zero_grad()
        optimizer.step()
        yield [model]


def zeros_kept(run: Run) -> Iterator[Sequence[nn.Module]]:
    """`zero_grad(set_to_none=False)`, with a layer that some steps do not use: momentum and weight decay go on."""
    parts = nn.ModuleDict({"a": run.network(), "b": run.network(seed=1)})
    model, optimizer = run.setup(parts)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        run.loss(step, square(parts["a"])).backward()
        if step % 2 == 0:
            run.loss(step, square(parts["b"])).backward()
        optimizer.step()
        yield [model]


def layer_unused(run: Run) -> Iterator[Sequence[nn.Module]]:
    """A layer that some steps do not use: it has no gradient there."""
    parts = nn.ModuleDict({"a": run.network(), "b": run.network(2, 2, seed=1)})
    model, optimizer = run.setup(parts)
    for step in range(STEPS):
        optimizer.zero_grad()
        both = nn.Sequential(parts["a"], parts["b"]) if step % 3 else parts["a"]
        run.loss(step, square(both)).backward()
        optimizer.step()
        yield [model]


def failed_on_all(run: Run) -> Iterator[Sequence[nn.Module]]:
    """A backward pass that raises an exception on all ranks, which drop the batch without a step."""
    model, optimizer = run.setup()

    def fail(_: Tensor) -> None:
        raise ArithmeticError

    for step in range(STEPS):
        optimizer.zero_grad()
        loss = run.loss(step, square(model))
        if step in (1, 2):
            hook = model[2].weight.register_hook(fail)
            with suppress(ArithmeticError):
                loss.backward()
            hook.remove()
            continue
        loss.backward()
        optimizer.step()
        yield [model]


def skipped_by_all(run: Run) -> Iterator[Sequence[nn.Module]]:
    """A step that all ranks leave out."""
    model, optimizer = run.setup()
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(step, square(model)).backward()
        if step not in (1, 2, 5):
            optimizer.step()
            yield [model]


def skipped_by_one(run: Run) -> Iterator[Sequence[nn.Module]]:
    """A step that one rank leaves out, as a `GradScaler` does, and makes up for at the end."""
    model, optimizer = run.setup()
    for step in range(STEPS + run.is_last):
        optimizer.zero_grad()
        run.loss(step, square(model)).backward()
        if not (run.is_last and step == 2):
            optimizer.step()
            yield [model]


def dropped_by_one(run: Run) -> Iterator[Sequence[nn.Module]]:
    """A batch that one rank drops: `zero_grad()`, and a step that changes nothing there."""
    model, optimizer = run.setup()
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(step, square(model)).backward()
        if run.is_last and step in (2, 4):
            optimizer.zero_grad()
        optimizer.step()
        yield [model]


def no_batch_on_one(run: Run) -> Iterator[Sequence[nn.Module]]:
    """A rank without a batch in some steps: `unisono.synchronize` in place of `backward()`."""
    model, optimizer = run.setup()
    for step in range(STEPS):
        optimizer.zero_grad()
        without = run.last if step in (2, 3) else None
        if run.is_last and without is not None:
            run.synchronize(model)
        else:
            run.loss(step, square(model), without).backward()
        optimizer.step()
        yield [model]


def no_second_batch_on_one(run: Run) -> Iterator[Sequence[nn.Module]]:
    """A rank with fewer batches between two steps: `unisono.synchronize` in place of the last `backward()`."""
    model, optimizer = run.setup()
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(2 * step, square(model)).backward()
        if run.is_last:
            run.synchronize(model)
        else:
            run.loss(2 * step + 1, square(model), run.last).backward()
        optimizer.step()
        yield [model]


def generator_and_critic(run: Run) -> Iterator[Sequence[nn.Module]]:
    """Two models with two optimizers (GAN): the backward pass of one leaves gradients in the other."""
    generator, its = run.setup(run.network(4, 5, 4))
    critic, own = run.setup(run.network(4, 5, 5, 1, seed=1))
    for step in range(STEPS):
        own.zero_grad()
        run.loss(step, lambda inputs: critic(inputs).sub(1).pow(2).mean()).backward()
        run.loss(step, lambda inputs: critic(generator(inputs.cos()).detach()).pow(2).mean()).backward()
        own.step()
        yield [critic]
        its.zero_grad()
        run.loss(step, lambda inputs: critic(generator(inputs.cos())).sub(1).pow(2).mean()).backward()
        its.step()
        yield [generator]


def two_models_one_optimizer(run: Run) -> Iterator[Sequence[nn.Module]]:
    """Two models with one optimizer."""
    encoder, decoder = run.network(4, 5, 3), run.network(3, 5, 4, seed=1)
    optimizer = run.optimizer([*encoder.parameters(), *decoder.parameters()])
    for model in (encoder, decoder):
        run.parallel(model, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(step, lambda inputs: (decoder(encoder(inputs)) - inputs).pow(2).mean()).backward()
        optimizer.step()
        yield [encoder, decoder]


def two_optimizers(run: Run) -> Iterator[Sequence[nn.Module]]:
    """One model whose halves have an optimizer each."""
    model = run.network()
    body, head = run.optimizer(model[:2].parameters()), run.optimizer(model[2:].parameters())
    run.parallel(model, head)
    for step in range(STEPS):
        body.zero_grad()
        head.zero_grad()
        run.loss(step, square(model)).backward()
        body.step()
        head.step()
        yield [model]


def frozen_for_a_while(run: Run) -> Iterator[Sequence[nn.Module]]:
    """A layer that is frozen for some steps."""
    model, optimizer = run.setup()
    for step in range(STEPS):
        model[0].requires_grad_(step not in (2, 3, 4))
        optimizer.zero_grad()
        run.loss(step, square(model)).backward()
        optimizer.step()
        yield [model]


def averaged_teacher(run: Run) -> Iterator[Sequence[nn.Module]]:
    """A teacher whose weights are a moving average of the model's."""
    model, optimizer = run.setup()
    teacher = copy.deepcopy(model).requires_grad_(False)
    run.models.append(teacher)
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(step, lambda inputs: (model(inputs) - teacher(inputs.cos())).pow(2).mean()).backward()
        optimizer.step()
        yield [model]
        with torch.no_grad():
            for averaged, trained in zip(teacher.parameters(), model.parameters(), strict=True):
                averaged.lerp_(trained, 0.1)


def tied_weights(run: Run) -> Iterator[Sequence[nn.Module]]:
    """An embedding whose weight is that of the output layer, too."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"embedding": nn.Embedding(9, 4), "output": nn.Linear(4, 9)}).double()
    model["output"].weight = model["embedding"].weight
    run.setup(model)

    def loss(inputs: Tensor) -> Tensor:
        tokens = inputs[:, 0].mul(4).long().remainder(9)
        return nn.functional.cross_entropy(model["output"](model["embedding"](tokens)), tokens)

    for step in range(STEPS):
        run.optimizers[0].zero_grad()
        run.loss(step, loss).backward()
        run.optimizers[0].step()
        yield [model]


def sparse_gradients(run: Run) -> Iterator[Sequence[nn.Module]]:
    """Sparse gradients (`nn.Embedding(sparse=True)`)."""
    model = nn.Embedding(9, 4, sparse=True).double()
    run.setup(model)
    yield [model]


def closure(run: Run) -> Iterator[Sequence[nn.Module]]:
    """`step(closure)`: the optimizer makes the forward and the backward pass."""
    model, optimizer = run.setup()
    for step in range(STEPS):

        def evaluate(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = run.loss(step, square(model))
            loss.backward()
            return loss

        optimizer.step(evaluate)
        yield [model]


def gradients_set(run: Run) -> Iterator[Sequence[nn.Module]]:
    """The same tensors on all ranks take the place of the gradients."""
    model, optimizer = run.setup()
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(step, square(model)).backward()
        for parameter in model.parameters():
            parameter.grad = parameter.detach().cos()
        optimizer.step()
        yield [model]


def never_cleared(run: Run) -> Iterator[Sequence[nn.Module]]:
    """No `zero_grad`: each step has the gradients of all steps before it, too."""
    model, optimizer = run.setup()
    for step in range(STEPS):
        run.loss(step, square(model)).backward()
        optimizer.step()
        yield [model]


def zeros_kept_in_one_pass(run: Run) -> Iterator[Sequence[nn.Module]]:
    """`zero_grad(set_to_none=False)`, with a layer that some steps do not use, and one that has not been used yet."""
    parts = nn.ModuleDict({"a": run.network(), "b": run.network(2, 2, seed=1)})
    model, optimizer = run.setup(parts)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        both = nn.Sequential(parts["a"], parts["b"]) if step in (1, 4) else parts["a"]
        run.loss(step, square(both)).backward()
        optimizer.step()
        yield [model]


def critic_then_generator(run: Run) -> Iterator[Sequence[nn.Module]]:
    """A pass for each of two models; that of the generator adds to the gradients that the critic's step has used."""
    generator, its = run.setup(run.network(4, 5, 4))
    critic, own = run.setup(run.network(4, 5, 5, 1, seed=1))
    for step in range(STEPS):
        own.zero_grad()
        run.loss(step, lambda x: (critic(generator(x.cos()).detach()) - critic(x)).pow(2).mean()).backward()
        own.step()
        yield [critic]
        for part in range(2):
            its.zero_grad()
            run.loss(2 * step + part, lambda x: critic(generator(x.cos())).sub(1).pow(2).mean()).backward()
            its.step()
            yield [generator]


def body_without_optimizer(run: Run) -> Iterator[Sequence[nn.Module]]:
    """The optimizer has the head alone, and never clears the gradients of the body."""
    model = run.network()
    head = run.optimizer(model[2:].parameters())
    run.parallel(model, head)
    for step in range(STEPS):
        head.zero_grad()
        run.loss(step, square(model)).backward()
        head.step()
        yield [model]


def empty_parameter(run: Run) -> Iterator[Sequence[nn.Module]]:
    """A parameter without elements has a state, too."""
    model = run.network()
    model.register_parameter("empty", nn.Parameter(torch.zeros(0, 3, dtype=torch.float64)))
    _, optimizer = run.setup(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(step, lambda x: square(model)(x) + model.empty.sum()).backward()
        optimizer.step()
        yield [model]


def lbfgs(run: Run) -> Iterator[Sequence[nn.Module]]:
    """`LBFGS`, with several backward passes in a step and the loss of all ranks (`world.allreduce`)."""
    model = run.network()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    run.parallel(model, optimizer)
    for step in range(STEPS):

        def evaluate(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = run.loss(step, square(model))
            loss.backward()
            return run.mean(loss)

        optimizer.step(evaluate)
        yield [model]


def zeroed_by_hand(run: Run) -> Iterator[Sequence[nn.Module]]:
    """`p.grad.data.zero_()` for each parameter, in place of `zero_grad()`."""
    model, optimizer = run.setup()
    for step in range(STEPS):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.data.zero_()
        run.loss(step, square(model)).backward()
        optimizer.step()
        yield [model]


def one_element(run: Run) -> Iterator[Sequence[nn.Module]]:
    """A model with fewer elements than there are ranks, as a temperature that is learned."""
    model = nn.Module()
    model.register_parameter("temperature", nn.Parameter(torch.zeros((), dtype=torch.float64)))
    _, optimizer = run.setup(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(step, lambda inputs: (inputs * model.temperature.exp()).sin().mean()).backward()
        optimizer.step()
        yield [model]


LOOPS: dict[str, Loop] = {
    loop.__name__: loop
    for loop in (
        plain,
        zero_grad_after_forward,
        closure,
        lbfgs,
        accumulated,
        accumulated_under_no_sync,
        accumulated_both_ways,
        accumulated_unevenly,
        forwards_before_backwards,
        one_graph_twice,
        disjoint,
        overlapping,
        some_gradients_removed,
        gradients_replaced,
        gradients_by_autograd_grad,
        gradients_of_a_copy,
        gradients_between,
        gradients_clipped,
        gradients_with_noise,
        gradient_penalty,
        weights_of_a_function,
        perturbed,
        dropped_without_step,
        dropped_with_step,
        failed_on_all,
        zeros_kept,
        layer_unused,
        skipped_by_all,
        skipped_by_one,
        dropped_by_one,
        stepped_twice_by_one,
        weights_loaded_on_one,
        weights_restored_on_one,
        stepped_in_backward,
        no_batch_on_one,
        no_second_batch_on_one,
        generator_and_critic,
        two_models_one_optimizer,
        two_optimizers,
        frozen_for_a_while,
        averaged_teacher,
        tied_weights,
        sparse_gradients,
        gradients_set,
        never_cleared,
        zeros_kept_in_one_pass,
        critic_then_generator,
        body_without_optimizer,
        empty_parameter,
        zeroed_by_hand,
        one_element,
    )
}
