"""Split of a model by a plan: the layers that it names become parallel ones; every rank keeps its own samples.

Sequential(conv, fc1, relu, drop1, fc2)   ─ split_model(model, world, plan) ─▶   the same modules

before     all ranks have the same whole weights      after     rank r holds its parts of fc1 and fc2, and the rest
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from unisono.errors import UsageError
from unisono.placement import holders_of, model_groups
from unisono.reducer.bucket_memory import UNSPLIT, ParameterParts
from unisono.reducer.control import LossWeight
from unisono.reducer.hooks import reducer_of
from unisono.tensor_parallel.check import check_plan
from unisono.tensor_parallel.dropout import use_sample_dropout
from unisono.tensor_parallel.layers import ParallelLayer, WeightPart, become, parts_of
from unisono.tensor_parallel.layouts import GroupLink, SampleNumbers
from unisono.tensor_parallel.plan import DROPOUT, ParallelPlan, PlanLike, make_plan
from unisono.world import World

ATTRIBUTE = "_unisono_split"
"""Attribute of a model that holds its ModelSplit."""


class ModelSplit:
    """Split of a model over the ranks of a world."""

    def __init__(self, plan: ParallelPlan, world: World) -> None:
        self.plan, self.world, self.numbers = plan, world, SampleNumbers(rank=world.rank)
        self.groups = {size: model_groups(world.placement, size) for size in plan.sizes}
        """Groups of all ranks, by their size."""
        self.links = {size: GroupLink(world.group_world(groups), self.numbers) for size, groups in self.groups.items()}
        """Group of this rank, by its size."""

    def weigh_by(self, weight: Callable[[], LossWeight]) -> None:
        """Weigh the losses of the ranks of a group by what `weight` returns on each."""
        for link in self.links.values():
            link.weigh_by(weight)

    def has_shares(self, average: int) -> bool:
        """Return True where the ranks of a group have settled the shares of their losses for an average."""
        return any(link.has_share(average) for link in self.links.values())

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


def exchanges_activations(model: nn.Module) -> bool:
    """Return True where the ranks of a group have to call the model equally often, as they exchange activations."""
    split = split_of(model)
    return split is not None and bool(split.plan.sizes)


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
    split = split_of(model)
    for link in split.links.values() if split is not None else ():
        link.gathered = None


def _begin_pass(model: nn.Module, _: object) -> None:
    """Begin a forward pass. In training it counts as a step, unless the program says which it is."""
    _free_gathered(model)
    split = split_of(model)
    recomputes = torch._C._current_graph_task_id() != -1
    if split is not None and split.numbers.counts and model.training and torch.is_grad_enabled() and not recomputes:
        split.numbers.step += 1
