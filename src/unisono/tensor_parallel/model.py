"""Split of a model by a plan: the layers that it names become parallel ones; every rank keeps its own samples.

Sequential(conv, fc1, relu, drop1, fc2)   ─ split_model(model, world, plan) ─▶   the same modules

before     all ranks have the same whole weights      after     rank r holds its parts of fc1 and fc2, and the rest

States and norms are those of the whole model, under the same names, whatever the split:

    rank 0   fc1.weight (3, 8), its momentum (3, 8) ┐ all-gather in the model group
    rank 1   fc1.weight (3, 8), its momentum (3, 8) ┴──▶ rank 0: fc1.weight (6, 8), its momentum (6, 8)

Loading is local: each rank cuts its own part. One tensor at a time is whole on the ranks beside rank 0.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unisono.errors import UsageError
from unisono.placement import holders_of, model_groups
from unisono.reducer.bucket_memory import UNSPLIT, ParameterParts, norm_of_all
from unisono.reducer.hooks import reducer_of
from unisono.tensor_parallel.check import check_plan
from unisono.tensor_parallel.layers import ParallelLayer, WeightPart, become, parts_of, use_sample_dropout
from unisono.tensor_parallel.layouts import GroupLink, SampleNumbers
from unisono.tensor_parallel.plan import DROPOUT, ParallelPlan, PlanLike, make_plan
from unisono.world import World

ATTRIBUTE = "_unisono_split"
"""Attribute of a model that holds its ModelSplit."""

NEEDS_WHOLE = ("LARS", "LAMB", "Adafactor", "LBFGS", "Muon")
"""Optimizers whose step of an element depends on all elements of its parameter."""

LAYERWISE = NEEDS_WHOLE[:2]
"""Those of them that need norms of layers, which `Sharded` sums over the ranks."""


class ModelSplit:
    """Split of a model over the ranks of a world."""

    def __init__(self, plan: ParallelPlan, world: World) -> None:
        self.plan, self.world, self.numbers = plan, world, SampleNumbers(rank=world.rank)
        self.groups = {size: model_groups(world.placement, size) for size in plan.sizes}
        """Groups of all ranks, by their size."""
        self.links = {size: GroupLink(world.group_world(groups), self.numbers) for size, groups in self.groups.items()}
        """Group of this rank, by its size."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelSplit:
        copied = object.__new__(ModelSplit)
        copied.__dict__ |= self.__dict__
        copied.numbers = copy.deepcopy(self.numbers, memo)
        copied.links = {size: copy.deepcopy(link, memo) for size, link in self.links.items()}
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def split_model(model: nn.Module, world: World, plan: PlanLike | str) -> nn.Module:
    """Split the layers of a model that `plan` names, and return it. Called by all ranks, with the same whole weights.

    Each rank then holds its part of their weights; the model takes the rank's own samples. Dropouts draw from (seed,
    step, sample, layer). Raises UsageError for a plan that does not fit, before anything is changed.
    """
    if split_of(model) is not None:
        raise UsageError("the model is split already: give the plan once")
    made = ModelSplit(check_plan(make_plan(plan), model, world.size), world)
    modules, cut = dict(model.named_modules()), set[int]()
    dropouts = use_sample_dropout(model, made.numbers)
    splits = [(name, split, made.links[split.ranks]) for name, split in made.plan.layers if split.ranks > 1]
    layers = [(modules[name], split, link) for name, split, link in splits if split.how != DROPOUT]
    parts = [parts_of(layer, split, link.world.rank) for layer, split, link in layers]  # before any tied weight is cut
    for (layer, split, link), own in zip(layers, parts, strict=True):
        become(layer, split, link, own, cut)
    for name, split, link in splits:
        if split.how == DROPOUT:
            dropouts[name].link, dropouts[name].dim = link, split.dim
    setattr(model, ATTRIBUTE, made)
    model.register_forward_pre_hook(_begin_pass)
    model.register_forward_hook(_free_gathered, always_call=True)
    return model


def split_of(model: nn.Module) -> ModelSplit | None:
    """Return the split of a model; None for one that is not split."""
    split: ModelSplit | None = getattr(model, ATTRIBUTE, None)
    return split


def links_of(model: nn.Module) -> tuple[GroupLink, ...]:
    """Return the links of this rank with its groups, which have to call the model equally often: they exchange
    activations."""
    split = split_of(model)
    return () if split is None else tuple(split.links.values())


def named_parts(model: nn.Module) -> dict[int, tuple[WeightPart, World]]:
    """Return the part of each split parameter and the world of its model group, by the id of the parameter."""
    return {
        id(module.get_parameter(name)): (part, module.link.world)
        for module in model.modules()
        if isinstance(module, ParallelLayer)
        for name, part in module.parts.items()
    }


def parameter_parts(model: nn.Module) -> ParameterParts:
    """Return the number of parts of each trainable parameter, and who holds the same ones: for the reducer."""
    split, parts = split_of(model), named_parts(model)
    if split is None:
        return UNSPLIT
    trainable = (id(parameter) for parameter in model.parameters() if parameter.requires_grad)
    counts = tuple(parts[key][0].ranks if key in parts else 1 for key in trainable)
    return ParameterParts(counts, {size: groups for size, groups in split.groups.items() if size in counts})


def agree_on_state(model: nn.Module, world: World) -> None:
    """Copy the weights and buffers of rank 0 to all ranks; a part of a split weight to the ranks that hold the same."""
    parts, split = named_parts(model), split_of(model)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            alike = world
            if split is not None and id(tensor) in parts:
                alike = world.group_world(holders_of(split.groups[parts[id(tensor)][0].ranks]))
            alike.broadcast(tensor)


def seed_dropout(model: nn.Module, seed: int, step: int, first: int | None = None) -> None:
    """Set the numbers that dropouts of a split model draw from, before a step; without it, steps are counted from 0.

    `first` is the number of this rank's first sample in the batch of all ranks; None where all shares are equal. A
    parallel model that "auto" has left whole stays as it is: its dropouts draw from PyTorch's generator. Raises
    UsageError for a model that is not parallel.
    """
    split = split_of(model)
    if split is None:
        if reducer_of(model) is None:
            raise UsageError("the model is neither split nor parallel: call unisono.parallel with a plan first")
        return
    split.numbers.seed, split.numbers.step, split.numbers.first, split.numbers.counts = seed, step, first, False


def _free_gathered(model: nn.Module, *_: object) -> None:
    """Free activations that were gathered in a forward pass."""
    for link in links_of(model):
        link.gathered = None


def _begin_pass(model: nn.Module, _: object) -> None:
    """Begin a forward pass. In training it counts as a step, unless the program says which it is."""
    _free_gathered(model)
    split = split_of(model)
    recomputes = torch._C._current_graph_task_id() != -1
    if split is not None and split.numbers.counts and model.training and torch.is_grad_enabled() and not recomputes:
        split.numbers.step += 1


def whole_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the model's state_dict with whole tensors on rank 0, {} elsewhere. Called by all ranks together."""
    state, split = model.state_dict(), split_of(model)
    if split is None:
        return state
    parts, parameters = named_parts(model), dict(model.named_parameters(remove_duplicate=False))
    whole = ((name, _whole(own, parameters.get(name), parts)) for name, own in state.items())
    return {name: value for name, value in whole if split.world.rank == 0}


def whole_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's state_dict with whole tensors on rank 0, {} elsewhere. Called by all ranks together."""
    state, split = optimizer.state_dict(), split_of(model)
    if split is None:
        return state
    parts, parameters, states = named_parts(model), _parameters(optimizer), dict[int, dict[str, Any]]()
    for number, entries in sorted(state["state"].items()):
        whole = ((key, _whole(entries[key], parameters[number], parts)) for key in sorted(entries))
        states[number] = {key: value for key, value in whole if split.world.rank == 0}
    return {**state, "state": states} if split.world.rank == 0 else {}


def cut_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state_dict with this rank's parts, from one with whole tensors. Not collective."""
    parts, states = named_parts(model), dict(state["state"])
    for number, parameter in enumerate(_parameters(optimizer)):
        if number in states and id(parameter) in parts:
            part, _ = parts[id(parameter)]
            whole = part.whole_shape(parameter.shape)
            states[number] = {
                key: part.cut(value) if isinstance(value, Tensor) and value.shape == whole else value
                for key, value in states[number].items()
            }
    return {**state, "state": states}


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return an optimizer's parameters, by their numbers in its state_dict."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _whole(value: Any, parameter: Tensor | None, parts: Mapping[int, tuple[WeightPart, World]]) -> Any:
    """Return the whole tensor for one that is shaped like a parameter's part; anything else as it is."""
    if parameter is None or id(parameter) not in parts:
        return value
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    part, group = parts[id(parameter)]
    own = value.detach().contiguous()
    return part.join(group.all_gather(own, own.new_empty((group.size, *own.shape))))


def clip_grad_norm(model: nn.Module, max_norm: float) -> float:
    """Scale the gradients so that the norm of all together is at most `max_norm`, and return the norm before.

    For a user's own loop, after `backward()`, in place of `torch.nn.utils.clip_grad_norm_`. Called by all ranks.
    """
    split, parameters = split_of(model), list(model.parameters())
    if split is None:
        return float(nn.utils.clip_grad_norm_(parameters, max_norm))
    parts = {key: part.ranks for key, (part, _) in named_parts(model).items()}
    norm = float(norm_of_all(((parameter.grad, parts.get(id(parameter), 1)) for parameter in parameters), split.world))
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(min(1.0, max_norm / (norm + 1e-6)))
    return norm


def check_split_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, sharded: bool) -> None:
    """Raise UsageError for an optimizer that needs whole parameters, where the model has parts of some.

    A `sharded` rule gives it norms of whole ones.
    """
    name = type(optimizer).__name__
    if name in NEEDS_WHOLE and named_parts(model) and not (sharded and name in LAYERWISE):
        remedy = "the rule Sharded, or SGD, Adam or AdamW" if name in LAYERWISE else "SGD, Adam or AdamW, or no plan"
        raise UsageError(f"{name} needs whole weights, and some layers are split: use {remedy}")
