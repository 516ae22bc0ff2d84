"""Data-parallel training of a model in a user's own loop.

model = unisono.parallel(model, world)
for inputs, labels in batches:
    loss(model(inputs), labels).backward()     every .grad is the average over all ranks
    optimizer.step()
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

from unisono.device import device_of
from unisono.errors import UsageError
from unisono.optimizers.layerwise import LayerwiseOptimizer
from unisono.optimizers.sharded import StepCheck, check_optimizer
from unisono.plan.layer_plan import AUTO, ParallelPlan, PlanLike, make_plan
from unisono.processor import HOST
from unisono.reducer import Reducer, reducer_of
from unisono.reducer.hooks import LIVING
from unisono.reducer.made_on import check_alike, warn_of_difference
from unisono.reducer.structure import compare_models, trainable
from unisono.reducer.virtual_ranks import VirtualRanks
from unisono.rules import BSP, BaseRule
from unisono.step.rule import Members, RankState
from unisono.tensor_parallel.choose_plan import Example, choose_plan
from unisono.tensor_parallel.model import (
    agree_on_state,
    check_split_optimizer,
    cut_optimizer_state,
    has_parts,
    links_of,
    parameter_parts,
    refusal,
    split_model,
    split_of,
)
from unisono.transports.exact import FORMATS
from unisono.wires import EXACT
from unisono.world import World

SPLIT_LOOP = (
    'plan="auto" has split layers: seed dropouts by seed_dropout, clip by clip_grad_norm (both in '
    "unisono.tensor_parallel), and call the model equally often on all ranks"
)
"""Warning about a loop of the user's own, which was written before the plan was known."""


def parallel(
    model: torch.nn.Module,
    world: World,
    rule: BaseRule | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    plan: PlanLike | str | None = None,
    example: Example | None = None,
    virtual_ranks: int = 0,
    threads: int = 1,
) -> torch.nn.Module:
    """Make `model` train in parallel, and return it: the same module, with an unchanged state_dict.

    All ranks get rank 0's weights and buffers. From then on, when `backward()` ends, every `.grad` is the average over
    all ranks. Ranks have equal weight, unless `add_samples` declares the number of samples of each rank's mean loss. A
    parameter that no rank has used has no gradient. A rank without a batch calls `synchronize(model)` instead of
    `backward()`.

    `rule` is `BSP()` by default. A rule on weights (`LocalSGD`, `DiLoCo`) needs the `optimizer`: `.grad` is then this
    rank's own, and `optimizer.step()`, whose calls a period counts, averages the weights when that is due. So does
    `Sharded`: each rank then has its shards of the gradients, and `optimizer.step()` updates and gathers the weights.
    Raises UsageError if the optimizer is missing or lacks a trainable parameter, for an asynchronous rule (`EASGD`),
    and for a model that is already parallel or has sparse gradients. A model that is parallel by the same rule takes
    another optimizer in place of the one before: `parallel(model, world, rule, other)`.

    `plan` splits layers over groups of ranks, as in {"fc1": "column 2 gives part", "fc2": "row 2 takes part"}
    (`plan/layer_plan.py`). Every rank keeps its own samples, and holds a part of those weights, and of the state that
    the `optimizer` has: create that of any other after this call. The ranks of a group exchange activations, so all
    call the model equally often; a rank without samples calls it with an empty batch. Raises UsageError for a plan that
    does not fit the model or the ranks.

    `plan="auto"` chooses the plan by prediction, from a few forward passes of a copy of the model on `example`: inputs
    of this rank as in data parallelism. If no split is predicted to be faster, nothing is split. Rank 0 logs the
    reasons; if layers are split, a warning lists what the loop has to do. Raises UsageError for a model that cannot be
    copied.

    With `virtual_ranks`, each batch has so many fixed shares, whose gradients are summed exactly: weights have the same
    bits for any number of ranks. Each rank computes some of them, with `threads` threads, in a loop over `shares`.
    Raises UsageError where ranks have other processors or versions; without virtual ranks, rank 0 warns.
    """
    chosen = BSP() if rule is None else rule
    if not (isinstance(model, torch.nn.Module) and isinstance(world, World)):
        raise UsageError(f"parallel(model, world) was given a {type(model).__name__} and a {type(world).__name__}")
    check_rule(chosen)
    _check_rule(model, chosen, optimizer)
    if (example is not None) != (plan == AUTO):
        raise UsageError('plan="auto" needs example=inputs, a batch as one rank has it, and no other plan takes one')
    if example is not None:
        reason = refusal(chosen, type(optimizer)) or ("virtual ranks sum whole layers" if virtual_ranks else "")
        plan = _plan_by_prediction(model, world, example, reason)
    reducer = reducer_of(model)
    if reducer is None or optimizer is None or plan is not None or not reducer.takes(model, world, chosen, optimizer):
        reducer = attach(model, world, chosen, plan, virtual_ranks, threads)
    elif (virtual := reducer.programs.virtual) is not None or virtual_ranks:
        before, of_before = 0 if virtual is None else virtual.count, torch.get_num_threads()
        if (virtual_ranks, threads) != (before, of_before):
            raise UsageError(
                f"virtual_ranks = {virtual_ranks}, threads = {threads} with another optimizer, but the model is "
                f"parallel with {before} and {of_before}: pass the same"
            )
    if optimizer is not None:
        check_split_optimizer(model, optimizer)
        if plan is not None and links_of(model) and optimizer.state:  # Adagrad has it from the start
            optimizer.load_state_dict(cut_optimizer_state(model, optimizer, optimizer.state_dict()))
        if chosen.traits.state is RankState.SHARDED:
            reducer.shard(optimizer, own_loop=True)
        else:
            reducer.follow(optimizer)
    return model


def check_rule(rule: object) -> None:
    """Raise UsageError for what is no rule: an optimizer in its place, a class, or a name."""
    if not isinstance(rule, BaseRule):
        given = f"the class {rule.__name__}" if isinstance(rule, type) else f"a {type(rule).__name__}"
        remedy = "pass a rule, as in unisono.LocalSGD(every=16)"
        if isinstance(rule, torch.optim.Optimizer):
            remedy = "the optimizer is the fourth argument, behind the rule"
        raise UsageError(f"the third argument is {given}, which is no instance of a rule: {remedy}")


def _check_rule(model: torch.nn.Module, rule: BaseRule, optimizer: torch.optim.Optimizer | None) -> None:
    """Raise UsageError for an optimizer that the rule lacks or cannot follow, and for a rule with servers."""
    name, state = type(rule).__name__, rule.traits.state
    sharded = state is RankState.SHARDED
    if (state.differs or sharded) and optimizer is None:
        does = "updates shards of the weights in" if sharded else "averages weights after"
        raise UsageError(f"{name} {does} the optimizer's step: call unisono.parallel(model, world, rule, optimizer)")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"the optimizer is a {type(optimizer).__name__}, which is no torch.optim.Optimizer, so its steps cannot be "
            "followed: pass the optimizer that it calls"
        )
    if optimizer is not None and state.differs:  # its step has to be the last change before weights are averaged
        known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for key, parameter in zip(*trainable(model), strict=True):
            if id(parameter) not in known:
                raise UsageError(
                    f"{name} averages all weights after the step of one optimizer, which does not have parameter "
                    f"{key}: give it all parameters, in groups where their options differ, or freeze {key} by "
                    "requires_grad_(False)"
                )
    former = reducer_of(model)
    if former is not None and former.structure.differs(model):
        former.give_back()  # while its world can gather the state
    if sharded and optimizer is not None:
        check_optimizer(optimizer)
    if rule.traits.members is Members.SERVERS:
        raise UsageError(f"{name} has servers, which `unisono train` runs: name the rule in a recipe (rule.name)")


def no_sync(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Return a context in which backward passes accumulate gradients on this rank only. The next pass averages them.

    Raises UsageError for a model that is not parallel.
    """
    return _reducer_of(model).accumulation.no_sync()


def add_samples(model: torch.nn.Module, samples: float) -> None:
    """Declare the number of samples of this rank's mean loss: the next average weights ranks by their samples.

    Call it before `backward()`, on every rank or on none. Calls add up until the next average. 0 declares an empty
    batch. With split layers, declare the samples of all passes of an average before the first. Raises UsageError for a
    number that is negative or not finite, for a model that is not parallel, and for a later declaration.
    """
    reducer = _reducer_of(model)
    if any(reducer.control.averages in link.shares for link in links_of(model)):
        raise UsageError(
            f"add_samples(model, {samples:g}) after a backward pass, which has exchanged gradients of split layers by "
            "the samples before: declare those of all passes of an average before the first, and before autograd.grad"
        )
    waits = not samples and reducer.traits.state.differs and reducer.runner.awaits_step
    if waits and any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in reducer.parameters):
        raise UsageError(
            "add_samples(model, 0) after another backward pass of the same step, whose gradients would be ignored too: "
            f"{type(reducer.rule).__name__} exchanges nothing in a backward pass, so leave out the empty one"
        )
    reducer.control.add_samples(samples)


def synchronize(model: torch.nn.Module) -> None:
    """Average the gradients of a parallel model. A rank without a batch calls this in place of `backward()`.

    The rank contributes the gradients accumulated under `no_sync`. If there are none, and it has added no samples, its
    weight is 0. Raises UsageError for a model that is not parallel, and for one with split layers.
    """
    reducer = _reducer_of(model)
    if links_of(model):
        raise UsageError(
            "layers are split, and the other ranks of a group wait for this one's activations: in place of synchronize "
            "call model(inputs[:0]).sum().backward(), and before it unisono.add_samples on every rank, with 0 on this"
        )
    reducer.synchronize()


def own_samples(model: torch.nn.Module, whole: int) -> range:
    """Return the numbers of this rank's samples in a batch of `whole` samples of all ranks: those of its virtual ranks.

    Raises UsageError for a model without virtual ranks.
    """
    return _virtual_of(model)[1].own_samples(whole)


def shares(
    model: torch.nn.Module, *tensors: torch.Tensor, whole: int | None = None, seed: int | None = None
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the tensors' rows for each of this rank's virtual ranks; a forward and a backward pass follow each.

        optimizer.zero_grad()
        for inputs, labels in unisono.shares(model, inputs, labels):
            loss(model(inputs), labels).backward()       # a mean over the share
        optimizer.step()                                 # every .grad is that of the batch of all ranks

    The tensors have `own_samples` of a batch of `whole` samples; None: all shares have equally many. Random numbers of
    a share follow from `seed`, by default the number of batches before. Gradients of earlier batches are cleared.
    Raises UsageError for a model without virtual ranks and for samples that do not fit.
    """
    reducer, virtual = _virtual_of(model)
    reducer.zero_grad()
    return virtual.passes(model, tensors, whole, seed, reducer.synchronize, reducer.accumulation.changes)


def _virtual_of(model: torch.nn.Module) -> tuple[Reducer, VirtualRanks]:
    reducer = _reducer_of(model)
    if (virtual := reducer.programs.virtual) is None:
        raise UsageError("the model has no virtual ranks: call unisono.parallel(model, world, virtual_ranks=V)")
    return reducer, virtual


def _reducer_of(model: torch.nn.Module) -> Reducer:
    if (reducer := reducer_of(model)) is None:
        raise UsageError("the model is not parallel: call unisono.parallel first")
    return reducer


def attach(
    model: torch.nn.Module,
    world: World,
    rule: BaseRule,
    plan: PlanLike | str | None = None,
    virtual_ranks: int = 0,
    threads: int = 1,
) -> Reducer:
    """Give all ranks rank 0's weights and buffers, split the model by a plan, and average gradients in each backward
    pass; return the reducer. Each of the `virtual_ranks` computes with `threads` threads."""
    alike = not rule.traits.state.differs
    prepare(model, alike=(world.size > 1 or bool(virtual_ranks)) and alike)
    for name, parameter in zip(*trainable(model), strict=True):
        if alike and parameter.grad_dtype not in (None, parameter.dtype):
            raise UsageError(
                f"parameter {name} of {parameter.dtype} has gradients of {parameter.grad_dtype} (grad_dtype), which "
                "are averaged in the parameter's own dtype: leave grad_dtype as it is"
            )
    if virtual_ranks:
        torch.set_num_threads(threads)
        if rule.exchange.wire is None:
            rule = replace(rule, exchange=replace(rule.exchange, wire=EXACT))
    if virtual_ranks or rule.exchange.wire == EXACT:
        world.call_on_all(lambda: check_exact(model, world.size, rule, virtual_ranks))
    if (plan is not None or split_of(model) is not None) and (reason := refusal(rule)):
        raise UsageError(reason)
    device = world.call_on_all(lambda: device_of([*model.parameters()] or [torch.empty(0)], "a model"))
    if virtual_ranks:
        check_alike(world, f"virtual_ranks = {virtual_ranks}")
    else:
        warn_of_difference(world, device, rule.traits.state)
    compare_models(model, world, None if plan is None else make_plan(plan, world.size))
    agree_on_state(model, world)
    if plan is not None:
        split_model(model, world, plan)
    reducer = Reducer(model, world, rule, parameter_parts(model), virtual_ranks)
    on_device = device.type != HOST
    sums = f"; {world.device_transports(device)}" if on_device and world.size > 1 else ""  # all ranks ask
    if on_device and world.rank == 0:
        logging.getLogger("unisono").info(f"model on {device}{sums}")
    for link in links_of(model):
        link.weigh_by(reducer.loss_weight)
    if links_of(model):
        _check_steps(model)
    return reducer


def _check_steps(model: torch.nn.Module) -> None:
    """Check each optimizer before its step, since the program may make its own later.

    Checks of this model and of those that are gone are removed here, and not by the collector: it may run while PyTorch
    goes through all hooks.
    """
    for key, hook in [*_global_optimizer_pre_hooks.items()]:
        if isinstance(hook, StepCheck) and hook.args[0]() in (None, model):
            del _global_optimizer_pre_hooks[key]
    eagerly = torch.compiler.disable(_check_step)  # type: ignore[no-untyped-call]  # a compiled step, too
    register_optimizer_step_pre_hook(StepCheck(eagerly, weakref.ref(model)))


def _check_step(model: weakref.ref[torch.nn.Module], optimizer: torch.optim.Optimizer, *_: object) -> None:
    if (living := model()) is None or (reducer := reducer_of(living)) is None:
        return
    check_split_optimizer(living, optimizer)
    if isinstance(optimizer, LayerwiseOptimizer) and has_parts(reducer, optimizer):
        reducer.complete_norms(optimizer)


def check_exact(model: torch.nn.Module, ranks: int, rule: BaseRule, virtual_ranks: int) -> None:
    """Raise UsageError where gradients cannot be summed exactly, or not in shares of so many virtual ranks."""
    named = f"virtual_ranks = {virtual_ranks}"
    if virtual_ranks < 0:
        raise UsageError(f"{named}, but it has to be at least the number of ranks, or 0 for none")
    if virtual_ranks and virtual_ranks < ranks:
        raise UsageError(
            f"{named}, but {ranks} ranks, so some would have no share: start at most {virtual_ranks} ranks, or raise it"
        )
    if rule.exchange.wire != EXACT:
        raise UsageError(f'{named}, but the sums of wire "{rule.exchange.wire}" depend on the ranks: use "exact"')
    averages = not virtual_ranks and rule.traits.state.has_anchor and rule.traits.members is Members.ALL
    if not (rule.traits.exact or averages):
        raise UsageError(f'{type(rule).__name__} does not sum by the wire "exact": use BSP or Sharded')
    for key, parameter in zip(*trainable(model), strict=True):
        if parameter.dtype.to_real() not in FORMATS:
            raise UsageError(
                f'parameter {key} is {parameter.dtype}, and the wire "exact" sums float32 and float64: convert it, or '
                "use another wire"
            )


def _plan_by_prediction(model: torch.nn.Module, world: World, example: Example, reason: str) -> ParallelPlan | None:
    """Return the chosen plan, the same on all ranks, and log it; None where nothing is split, as `reason` says."""
    prepare(model)
    compare_models(model, world)
    choice = choose_plan(model, world, example, refused=reason)
    plan = choice.plan or None
    if world.rank == 0:
        for line in choice.lines:
            logging.getLogger("unisono").info(line)
        if plan is not None:
            logging.getLogger("unisono").warning(SPLIT_LOOP)
    return plan


def prepare(model: torch.nn.Module, alike: bool = False) -> None:
    """Raise UsageError for a model that cannot be made parallel, or whose ranks' weights cannot be `alike`.

    A parallel model whose parameters have changed since can be made parallel again.
    """
    if lazy := [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor)]:
        raise UsageError(f"{lazy[0]} of a lazy module has no shape yet: make one forward pass before unisono.parallel")
    reducer = reducer_of(model)
    parts = (reducer_of(module) for module in model.modules() if module is not model)
    if any(part is not None and part is not reducer for part in parts) or (  # a compiled model shows its attributes
        reducer is not None and not reducer.structure.differs(model)
    ):
        raise UsageError("the model, or a part of it, is parallel already: call unisono.parallel once")
    if _held_elsewhere(model, reducer) is not None:
        gc.collect()  # an earlier model may be kept by what refers to itself alone
    if (shared := _held_elsewhere(model, reducer)) is not None:
        raise UsageError(
            f"parameter {shared} belongs to another parallel model too, and one of the two would lose its gradient: "
            "make one parallel model of both (torch.nn.ModuleDict), or delete the other (del), with its Trainer, where "
            "it is no longer used"
        )
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
            continue
        bounded = alike and module.max_norm is not None
        if not (module.sparse or bounded) or not module.weight.requires_grad:  # which a parametrization computes
            continue
        if module.sparse:
            raise UsageError(f"{name or 'the model'} gives sparse gradients, which are not averaged: use sparse=False")
        raise UsageError(
            f"{name or 'the model'} has max_norm={module.max_norm:g}: its forward pass scales the rows that this rank "
            "looks up, so weights of ranks would differ: use max_norm=None, and after each step on all ranks "
            f"weight.data.renorm_({module.norm_type:g}, 0, {module.max_norm:g})"
        )
    if reducer is not None:
        reducer.release()


def _held_elsewhere(model: torch.nn.Module, reducer: Reducer | None) -> str | None:
    """Return the name of a trainable parameter whose gradient another model's reducer takes; None without one."""
    held = {id(parameter) for other in LIVING if other is not reducer for parameter in other.parameters}
    return next((name for name, parameter in zip(*trainable(model), strict=True) if id(parameter) in held), None)
