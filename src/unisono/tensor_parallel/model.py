"""Split of a model by a plan: its layers become parallel ones, and ranks of a group share samples.

Sequential(fc1, relu, drop1, fc2)   ─ split_model(model, world, plan) ─▶   the same modules; fc1 and fc2 hold parts

before     all ranks have the same whole weights      after     rank r holds its parts of fc1 and fc2, and the rest
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from unisono.errors import UsageError
from unisono.reducer.attachment import reducer_of
from unisono.reducer.parameter_parts import UNSPLIT, ParameterParts
from unisono.tensor_parallel.check import check_plan, kind_of
from unisono.tensor_parallel.dropout import DropoutSeed, use_sample_dropout
from unisono.tensor_parallel.group_worlds import GroupWorlds
from unisono.tensor_parallel.groups import ModelGroups, model_groups
from unisono.tensor_parallel.layer import GroupLink, ParallelLayer, become, parts_of
from unisono.tensor_parallel.part import WeightPart
from unisono.tensor_parallel.plan import DROPOUT, ParallelPlan, PlanLike, make_plan
from unisono.world import World

ATTRIBUTE = "_unisono_split"
"""Attribute of a model that holds its ModelSplit."""


class ModelSplit:
    """Split of a model over the ranks of a world."""

    def __init__(self, plan: ParallelPlan, groups: ModelGroups, world: World, data: World, seed: DropoutSeed) -> None:
        self.plan, self.groups, self.world = plan, groups, world
        self.data = data
        """World of ranks that have every sample once: one of each group of ranks that share samples."""
        self.seed = seed
        """Numbers that the masks of dropouts follow from."""

    def __deepcopy__(self, _: dict[int, Any]) -> ModelSplit:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def split_model(model: nn.Module, world: World, plan: PlanLike | str) -> nn.Module:
    """Split the layers of a model that `plan` names, and return it. Called by all ranks, with the same whole weights.

    Each rank then holds its part of their weights; the model takes the samples of its group. Dropouts draw from (seed,
    step, sample, layer). Raises UsageError for a plan that does not fit, before anything is changed.
    """
    if split_of(model) is not None:
        raise UsageError("the model is split already: give the plan once")
    checked = check_plan(make_plan(plan), model, world.size)
    groups = model_groups(checked.sizes, world.placement)
    worlds = world.resource(GroupWorlds)
    data = data_world_of(checked, world)
    links = {size: GroupLink(worlds.of(groups.model(size))) for size in checked.sizes}
    seed, modules, cut = DropoutSeed(share=data.rank), dict(model.named_modules()), set[int]()
    dropouts, kinds = use_sample_dropout(model, seed), dict[str, tuple[type[ParallelLayer], dict[str, WeightPart]]]()
    for name, split in checked.layers:
        if split.ranks > 1 and (kind := kind_of(modules[name], split)) is not None:
            kinds[name] = kind, parts_of(kind, modules[name], split, links[split.ranks].world.rank)
    for name, split in checked.layers:
        if name in kinds:
            kind, parts = kinds[name]
            become(modules[name], kind, split, links[split.ranks], parts, cut)
        elif split.how == DROPOUT and split.ranks > 1:
            dropouts[name].link, dropouts[name].dim = links[split.ranks], split.dim
    setattr(model, ATTRIBUTE, ModelSplit(checked, groups, world, data, seed))
    model.register_forward_pre_hook(_count_step)
    return model


def split_of(model: nn.Module) -> ModelSplit | None:
    """Return the split of a model; None for one that is not split."""
    found: ModelSplit | None = getattr(model, ATTRIBUTE, None)
    return found


def data_world_of(plan: ParallelPlan, world: World) -> World:
    """Return the world of ranks that have every sample once under a plan with all its sizes. Called by all ranks."""
    if plan.sharing == 1:
        return world
    return world.resource(GroupWorlds).of(model_groups(plan.sizes, world.placement).data())


def data_world(model: nn.Module, world: World) -> World:
    """Return the world of ranks that have every sample once: `world` itself where the model is not split."""
    found = split_of(model)
    return world if found is None else found.data


def named_parts(model: nn.Module) -> dict[int, tuple[WeightPart, World]]:
    """Return the part of each split parameter and the world of its model group, by the id of the parameter."""
    return {
        id(module.get_parameter(name)): (part, module.group)
        for module in model.modules()
        if isinstance(module, ParallelLayer)
        for name, part in module.parts.items()
    }


def parameter_parts(model: nn.Module) -> ParameterParts:
    """Return the number of parts of each trainable parameter, and who holds the same ones: for the reducer."""
    found = split_of(model)
    if found is None:
        return UNSPLIT
    parts = named_parts(model)
    trainable = [one for one in model.parameters() if one.requires_grad]
    counts = tuple(parts[id(one)][0].ranks if id(one) in parts else 1 for one in trainable)
    holders = {size: found.groups.holders(size) for size in found.plan.sizes if size in counts}
    return ParameterParts(counts, holders, found.groups.shared_by)


def seed_dropout(model: nn.Module, seed: int, step: int, first: int | None = None) -> None:
    """Set the numbers that dropouts of a split model draw from, before a step; without it, steps are counted from 0.

    `first` is the number of this rank's first sample in the batch of all ranks; None where all shares are equal. A
    parallel model that "auto" has left whole stays as it is: its dropouts draw from PyTorch's generator. Raises
    UsageError for a model that is not parallel.
    """
    found = split_of(model)
    if found is None:
        if reducer_of(model) is None:
            raise UsageError("the model is neither split nor parallel: call unisono.parallel with a plan first")
        return
    found.seed.seed, found.seed.step, found.seed.first, found.seed.counts = seed, step, first, False


def _count_step(model: nn.Module, _: object) -> None:
    """Count a forward pass in training as a step, unless the program says which it is."""
    found = split_of(model)
    recomputes = torch._C._current_graph_task_id() != -1
    if found is not None and found.seed.counts and model.training and torch.is_grad_enabled() and not recomputes:
        found.seed.step += 1
