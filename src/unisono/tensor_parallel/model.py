"""Split of a model by a plan: the layers that it names become parallel ones; every rank keeps its own samples.

A plan is checked against the model before (`check_plan`): by names, types and shapes alone, for any number of ranks.
Every refusal is one line with its remedy. States and norms are those of the whole model, under the same names. Loading
is local: each rank cuts its own part. One tensor at a time is whole on the ranks beside rank 0.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn

from unisono.errors import UsageError
from unisono.optimizers.layerwise import LayerwiseOptimizer
from unisono.placement import holders_of, model_groups
from unisono.plan.layer_plan import DROPOUT, PART, ParallelPlan, PlanLike, Split, make_plan
from unisono.plan.trace import tensors_in
from unisono.reducer.bucket_memory import distinct
from unisono.reducer.hooks import reducer_of
from unisono.reducer.parameter_parts import UNSPLIT, ParameterParts, norm_of_all
from unisono.reducer.reducer import Reducer
from unisono.reducer.structure import broadcast_all
from unisono.rules import BaseRule
from unisono.tensor_parallel.layers import KINDS, ParallelLayer, WeightPart, become, parts_of, use_sample_dropout
from unisono.tensor_parallel.layouts import GroupLink, SampleNumbers, exchange
from unisono.wires import EXACT
from unisono.world import World

ATTRIBUTE = "_unisono_split"
"""Attribute of a model that holds its ModelSplit."""

NEEDS_WHOLE = ("LARS", "LAMB", "ADAFACTOR", "LBFGS", "MUON")
"""Optimizers whose step of an element depends on all of its parameter; a LayerwiseOptimizer sums the norms of parts."""

ELEMENTWISE = {
    *(nn.CELU, nn.Dropout, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Identity),
    *(nn.LeakyReLU, nn.LogSigmoid, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus),
    *(nn.Softshrink, nn.Softsign, nn.Tanh, nn.Tanhshrink, nn.Threshold),
}
"""Modules without weights that work on each feature by itself."""
_POOLS = [f"{kind}Pool{dims}d" for kind in ("AdaptiveAvg", "AdaptiveMax", "Avg", "LP", "Max") for dims in (1, 2, 3)]
_OTHERS = "Flatten", *nn.modules.padding.__all__, *nn.modules.upsampling.__all__
OF_CHANNELS = {getattr(nn, kind) for kind in (*_POOLS, *_OTHERS)}
"""Modules that work on each channel of a convolution by itself."""
OF_KEYS = {nn.LogSoftmax, nn.Softmax, nn.Softmin}
"""Modules that attention, whose query, key and value give parts, has over the keys, for each head by itself."""


class ModelSplit:
    """Split of a model over the ranks of a world."""

    def __init__(self, plan: ParallelPlan, world: World) -> None:
        self.plan, self.world, self.numbers = plan, world, SampleNumbers(rank=world.rank)
        sizes = sorted({split.ranks for split in plan.values()})
        self.groups = {size: model_groups(world.placement, size) for size in sizes}
        """Groups of all ranks, by their size."""
        self.links = {size: GroupLink(world.group_world(groups), self.numbers) for size, groups in self.groups.items()}
        """Group of this rank, by its size."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelSplit:
        copied = object.__new__(ModelSplit)
        copied.__dict__ |= self.__dict__
        copied.numbers, copied.links = copy.deepcopy((self.numbers, self.links), memo)
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def check_plan(plan: ParallelPlan, model: nn.Module, ranks: int) -> ParallelPlan:
    """Return the plan with all names and sizes, in the order of the model's modules, without groups of one rank.
    Wildcards are replaced by the layers that they name, a size of 0 by `ranks`; dropouts between a layer that gives its
    part and one that takes it are added. Raises UsageError for a plan that does not fit the model, or the ranks."""
    modules, named = dict(model.named_modules()), dict[str, Split]()
    for name, split in plan.items():
        matching = [module for module in modules if fnmatchcase(module, name)] if name not in modules else [name]
        if not matching or name == "":
            able = [path for path, one in modules.items() if type(one) in {of for of, how in KINDS if how != DROPOUT}]
            near = difflib.get_close_matches(name, able, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"layers that can be split are {', '.join(able) or 'none'}"
            raise UsageError(f"the plan names a layer {name!r}, which the model does not have; {hint}")
        named |= dict.fromkeys(matching, replace(split, ranks=split.ranks or ranks))
    for name, split in named.items():
        if reason := split_refusal(modules[name], split, ranks):
            raise UsageError(f"layer {name!r}{reason}")
    splits = _with_dropouts({name: split for name, split in named.items() if split.ranks > 1}, modules)
    _check_ties(splits, modules)
    return splits


def split_refusal(layer: nn.Module, split: Split, ranks: int) -> str:
    """Return why a layer cannot be split so, in words behind its name, with the remedy; empty where it can."""
    kind, hows = type(layer).__name__, {how: parallel for (of, how), parallel in KINDS.items() if of is type(layer)}
    if ranks % split.ranks:
        fits = ", ".join(str(size) for size in range(1, ranks + 1) if ranks % size == 0)
        return f": groups of {split.ranks} do not divide {ranks} ranks: use one of {fits}"
    if split.how not in hows:
        able = "Linear, Conv1d, Conv2d, Conv3d, Embedding and MultiheadAttention can be"
        remedy = f"split it by {' or '.join(hows)}" if hows else able
        return f" is a {kind}, which cannot be split by {split.how}: {remedy}"
    reason = hows[split.how].refusal(layer, split) if split.ranks > 1 else ""
    return f" ({kind}) {reason}" if reason else ""


def _with_dropouts(splits: Mapping[str, Split], modules: Mapping[str, nn.Module]) -> ParallelPlan:
    """Return the splits in the order of the modules, with the dropouts between a layer that gives its part and the one
    that takes it. Raises UsageError for parts that nobody gives, or takes, or that a module between cannot take."""
    found, givers, between = ParallelPlan(), list[str](), ""  # layers whose parts wait; what cannot take them
    sizes = {split.ranks for split in splits.values() if split.gives == PART}
    for name, module in modules.items():
        giver = givers[0] if givers else ""
        if split := splits.get(name):
            found[name] = split
        elif giver and type(module) is nn.Dropout:
            kind = KINDS[type(modules[giver]), splits[giver].how]
            found[name] = Split(DROPOUT, splits[giver].ranks, dim=kind.features)
        between = between or (_part_refusal(name, givers, splits, modules) if giver else "")
        if split and split.how == DROPOUT and split.ranks not in sizes:  # wherever it is defined
            raise UsageError(f"no layer gives parts of {split.ranks} ranks to {name!r}: leave it out of the plan")
        if split and split.takes == PART:
            given = f"{giver!r} gives those of {splits[giver].ranks}" if giver else "no layer before it gives any"
            if not giver or between or splits[giver].ranks != split.ranks:
                raise UsageError(
                    f"layer {name!r} takes parts of {split.ranks} ranks, but {given}{between}: leave away 'takes part' "
                    "and 'gives part', or give it parts of as many ranks, with no such module between"
                )
            givers = []
        if split and split.gives == PART:
            givers.append(name)
    if givers:
        raise UsageError(f"layer {givers[0]!r} gives a part, which no layer after it takes: leave away 'gives part'")
    return found


def _part_refusal(name: str, givers: list[str], splits: Mapping[str, Split], modules: Mapping[str, nn.Module]) -> str:
    """Return why a module cannot be between `givers` and the layer that takes their parts; empty where it can. Layers
    that take own samples may give parts as well, as query, key and value do, but not behind others in a Sequential."""
    module, kind, split, giver = modules[name], type(modules[name]), splits.get(name), givers[0]
    own, fits, reason = [*module.parameters(recurse=False)], False, "needs all features of own samples"
    if split:
        shared = [path for path in modules if giver.startswith(f"{path}.") and name.startswith(f"{path}.")]
        in_turn = isinstance(modules[max(shared, key=len, default="")], nn.Sequential)
        beside = split.gives == PART and split.ranks == splits[giver].ranks and not in_turn
        fits = beside or split.takes == PART or split.how == DROPOUT
    elif not any(weight.requires_grad for weight in own):
        channels = KINDS[type(modules[giver]), splits[giver].how].features == 1
        keys = len(givers) > 2 and not isinstance(modules[name.rpartition(".")[0]], nn.Sequential)
        known = ELEMENTWISE | (OF_CHANNELS if channels else OF_KEYS if keys else set())
        holds = kind in (nn.ModuleDict, nn.ModuleList, nn.Sequential) or (not own and [*module.parameters()])
        fits = bool(holds) or kind in known or getattr(module, "works_on_parts", False)
        reason = f"({kind.__name__}) is not known to work on each feature by itself (if so, set works_on_parts = True)"
    return "" if fits else f", and {name!r} between {reason}"


def _check_ties(splits: Mapping[str, Split], modules: Mapping[str, nn.Module]) -> None:
    """Raise UsageError where a weight belongs to two layers that do not cut it alike."""
    cuts: dict[int, tuple[str, WeightPart | None]] = {}
    layers = {name: parts_of(modules[name], split, 0) for name, split in splits.items()}
    parts = {f"{name}.{parameter}": part for name, own in layers.items() for parameter, part in own.items()}
    for name, module in modules.items():
        for parameter, tensor in module.named_parameters(name, recurse=False):
            part = parts.get(parameter)
            first, cut = cuts.setdefault(id(tensor), (parameter, part))
            if cut != part or (part is not None and first != parameter and len(tensor) % part.ranks):
                raise UsageError(
                    f"{parameter} and {first} are one weight, but are not split alike: split both over the same "
                    "ranks and dimension, which they divide, or neither"
                )


def split_model(model: nn.Module, world: World, plan: PlanLike | str) -> nn.Module:
    """Split the layers of a model that `plan` names, and return it. Called by all ranks, with the same whole weights.
    Each rank then holds its part of their weights; the model takes the rank's own samples. Dropouts draw from (seed,
    step, sample, layer). Raises UsageError for a plan that does not fit, before anything is changed."""
    if split_of(model) is not None:
        raise UsageError("the model is split already: give the plan once")
    made = ModelSplit(check_plan(make_plan(plan), model, world.size), world)
    splits = ((model.get_submodule(name), split, made.links[split.ranks]) for name, split in made.plan.items())
    layers = [(layer, split, link, parts_of(layer, split, link.world.rank)) for layer, split, link in splits]
    for name, each in zip(made.plan, layers, strict=True):  # behind the parts of all: a tied weight is cut once
        become(*each, name)
    use_sample_dropout(model, made.numbers)
    for encoder in (module for module in model.modules() if isinstance(module, nn.TransformerEncoder)):
        if named_parts(encoder):  # which take no nested ones
            encoder.use_nested_tensor = False
    setattr(model, ATTRIBUTE, made)
    model.register_forward_pre_hook(_begin_pass)
    model.register_forward_hook(_end_pass)
    return model


def split_of(model: nn.Module) -> ModelSplit | None:
    """Return the split of a model; None for one that is not split."""
    return getattr(model, ATTRIBUTE, None)


def links_of(model: nn.Module) -> tuple[GroupLink, ...]:
    """Return the links of this rank with its groups, whose ranks have to call the model equally often."""
    return tuple(split.links.values()) if (split := split_of(model)) else ()


def named_parts(model: nn.Module) -> dict[int, tuple[WeightPart, World]]:
    """Return the part of each split parameter and the world of its model group, by the id of the parameter."""
    layers = [module for module in model.modules() if isinstance(module, ParallelLayer)]
    return {id(each.get_parameter(key)): (part, each.link.world) for each in layers for key, part in each.parts.items()}


def parameter_parts(model: nn.Module) -> ParameterParts:
    """Return the number of parts of each trainable parameter, and who holds the same ones: for the reducer."""
    split, parts = split_of(model), named_parts(model)
    if split is None:
        return UNSPLIT
    counts = tuple(parts[id(p)][0].ranks if id(p) in parts else 1 for p in model.parameters() if p.requires_grad)
    return ParameterParts(counts, {size: groups for size, groups in split.groups.items() if size in counts})


def agree_on_state(model: nn.Module, world: World) -> None:
    """Copy the weights and buffers of rank 0 to all ranks; a part of a split weight to the ranks that hold the same."""
    parts, split, by_count = named_parts(model), split_of(model), dict[int, list[Tensor]]()
    for tensor in (*model.parameters(), *model.buffers()):
        by_count.setdefault(parts[id(tensor)][0].ranks if id(tensor) in parts else 1, []).append(distinct(tensor))
    for count, tensors in by_count.items():
        broadcast_all(tensors, world.group_world(holders_of(split.groups[count])) if split and count > 1 else world)


def seed_dropout(model: nn.Module, seed: int, step: int, first: int | None = None) -> None:
    """Set the numbers that dropouts of a split model draw from, before a step; without it, steps are counted from 0.
    `first` is the number of this rank's first sample in the batch of all ranks; None where all shares are equal. A
    model that "auto" has left whole stays as it is. Raises UsageError for a model that is not parallel."""
    if split := split_of(model):
        vars(split.numbers).update(seed=seed, step=step, ended=step, first=first, counts=False)
    elif reducer_of(model) is None:
        raise UsageError("the model is neither split nor parallel: call unisono.parallel with a plan first")


def _begin_pass(model: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Begin a forward pass: in training a step; one without gradients counts above, but in a reentrant checkpoint."""
    for link in links_of(model):
        link.gathered, link.exchanges = None, 0  # of a pass that has failed
    if (split := split_of(model)) and model.training and torch._C._current_graph_task_id() == -1:  # no recomputation
        numbers, step = split.numbers, split.numbers.ended
        trains = torch.is_grad_enabled() or any(each.requires_grad for each in tensors_in(inputs))
        numbers.step = step % (1 << 32) + numbers.counts if trains else step + (1 << 32)


def _end_pass(model: nn.Module, *_: object) -> None:
    """Count a forward pass. One that fails is not counted, so that ranks have equal steps behind it."""
    if split := split_of(model):
        split.numbers.ended = split.numbers.step


def whole_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the model's state_dict with whole tensors; of a split model on rank 0 alone. Called by all together."""
    return _whole(model, model.state_dict(), dict(model.named_parameters(remove_duplicate=False)))


def whole_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's state_dict with whole tensors, as `whole_state_dict`. Called by all ranks together."""
    state, split = optimizer.state_dict(), split_of(model)
    parameters = [weight for group in optimizer.param_groups for weight in group["params"]]  # by index in the state
    flat = {(index, key): each[key] for index, each in sorted(state["state"].items()) for key in sorted(each)}
    full = _whole(model, flat, {place: parameters[place[0]] for place in flat})
    states = {index: {key: full[index, key] for key in each} for index, each in state["state"].items() if full}
    return {**state, "state": states} if split is None or split.world.rank == 0 else {}


def cut_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state_dict with this rank's parts, from one with whole tensors. Not collective."""
    parts, states = named_parts(model), dict(state["state"])
    for index, parameter in enumerate(weight for group in optimizer.param_groups for weight in group["params"]):
        if index in states and id(parameter) in parts:
            states[index] = {key: parts[id(parameter)][0].cut(value) for key, value in states[index].items()}
    return {**state, "state": states}


def _whole(model: nn.Module, state: dict[Any, Any], parameters: Mapping[Any, Tensor]) -> dict[Any, Any]:
    """Return a state on rank 0, {} elsewhere, with whole tensors for those shaped as the part of their parameter."""
    if (split := split_of(model)) is None:
        return state
    parts, gathered = named_parts(model), copy.copy(state)
    for name, value in state.items():
        full, weight = value, parameters.get(name)
        if weight is not None and id(weight) in parts and isinstance(value, Tensor) and value.shape == weight.shape:
            part, group = parts[id(weight)]
            blocks, dim = torch.unflatten(value.detach(), part.dim, (part.blocks, -1)), part.dim + 1
            full = exchange(blocks, group, None, dim).narrow(dim, 0, part.shape[part.dim] // part.blocks)
            full = full.flatten(part.dim, dim).contiguous()
        if split.world.rank == 0:
            gathered[name] = full
    return gathered if split.world.rank == 0 else {}


def clip_grad_norm(model: nn.Module, max_norm: float) -> float:
    """Scale the gradients so that the norm of all together is at most `max_norm`, and return the norm before.
    For a user's own loop, after `backward()`, in place of `torch.nn.utils.clip_grad_norm_`. Called by all ranks."""
    split, parameters = split_of(model), list(model.parameters())
    if split is None:
        return float(nn.utils.clip_grad_norm_(parameters, max_norm))
    parts = {key: part.ranks for key, (part, _) in named_parts(model).items()}
    norm = norm_of_all(((parameter.grad, parts.get(id(parameter), 1)) for parameter in parameters), split.world)
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return float(norm)


def refusal(rule: BaseRule, optimizer: type = object) -> str:
    """Return why a rule, or an optimizer of this class, takes no split layers, with the remedy; empty if both do."""
    needs_whole = any(kind.__name__.upper() in NEEDS_WHOLE for kind in optimizer.mro())
    sums_norms = issubclass(optimizer, LayerwiseOptimizer) and unwrap(optimizer.step) is unwrap(LayerwiseOptimizer.step)
    if not rule.traits.groups:
        return f"{type(rule).__name__} does not take split layers: use BSP or Sharded, or no plan"
    if rule.exchange.wire == EXACT:
        return 'split layers do not sum by the wire "exact", as virtual ranks do: use another, or no plan'
    if not needs_whole or sums_norms:
        return ""
    fits = "SGD, Adam, AdamW, or LARS or LAMB of unisono.optimizers"
    return f"{optimizer.__name__} needs whole weights, not parts of split layers: use {fits}, or no plan"


def check_split_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError for an optimizer that needs whole weights, where it has parts of some of a parallel model's."""
    reducer = reducer_of(model)
    if reducer is not None and (reason := refusal(reducer.rule, type(optimizer))) and has_parts(reducer, optimizer):
        raise UsageError(reason)


def has_parts(reducer: Reducer, optimizer: torch.optim.Optimizer) -> bool:
    """Return True for an optimizer with parts of weights. Asking modules would wait for the update it is within."""
    held, parts = {id(each) for group in optimizer.param_groups for each in group["params"]}, reducer.memory.parts
    return any(id(each) in held and parts.of(index) > 1 for index, each in enumerate(reducer.parameters))
