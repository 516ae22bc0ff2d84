"""Check of a plan against a model and a number of ranks. Every refusal is one line with its remedy.

    plan {"fc*": "column gives part", ...} ─▶ names of the model, sizes of groups, dropouts between ─▶ ParallelPlan

Pure: it looks at names, types and shapes alone.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import nn

from unisono.errors import UsageError
from unisono.tensor_parallel.layers import KINDS, ColumnParallelConvolution, ParallelLayer, parts_of
from unisono.tensor_parallel.plan import DROPOUT, PART, ParallelPlan, Split


def check_plan(plan: ParallelPlan, model: nn.Module, ranks: int) -> ParallelPlan:
    """Return the plan with all names and sizes, in the order of the model's modules.

    Wildcards are replaced by the layers that they name, a size of 0 by `ranks`; dropouts between a layer that gives its
    part and one that takes it are added. Raises UsageError for an unknown name, a layer that cannot be split as asked,
    groups that do not divide the ranks, a part that no layer takes, and a weight that is tied to one that is not split
    alike.
    """
    modules, splits = dict(model.named_modules()), dict[str, Split]()
    for name, split in plan.layers:
        sized = replace(split, ranks=split.ranks or ranks)
        splits |= dict.fromkeys(_matching(name, modules), sized)
    for name, split in splits.items():
        if ranks % split.ranks:
            fits = ", ".join(str(size) for size in range(1, ranks + 1) if ranks % size == 0)
            raise UsageError(f"layer {name!r}: groups of {split.ranks} do not divide {ranks} ranks: use one of {fits}")
        _check_layer(name, modules[name], split)
    checked = _with_dropouts(splits, modules)
    _check_ties(checked, model)
    return checked


def _matching(name: str, modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the modules with a name, which may have wildcards."""
    matching = [module for module in modules if fnmatchcase(module, name)] if name not in modules else [name]
    if not matching or name == "":
        able = [own for own, module in modules.items() if any(type(module) is kind for kind, _ in KINDS)]
        near = difflib.get_close_matches(name, able, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"layers that can be split are {', '.join(able) or 'none'}"
        raise UsageError(f"the plan names a layer {name!r}, which the model does not have; {hint}")
    return matching


def _check_layer(name: str, layer: nn.Module, split: Split) -> None:
    kind, parallel = type(layer).__name__, KINDS.get((type(layer), split.how))
    if split.how == DROPOUT:
        if type(layer) is not nn.Dropout:
            raise UsageError(f"layer {name!r} is a {kind}: only a Dropout takes 'dropout'")
        return
    if isinstance(layer, ParallelLayer):
        raise UsageError(f"layer {name!r} is split already: make the model parallel once")
    if parallel is None:
        hows = [how for of, how in KINDS if of is type(layer)]
        remedy = f"split it by {' or '.join(hows)}" if hows else "Linear, Conv1d, Conv2d, Conv3d and Embedding can be"
        raise UsageError(f"layer {name!r} is a {kind}, which cannot be split by {split.how}: {remedy}")
    if split.ranks > 1 and (reason := parallel.refusal(layer, split)) is not None:
        raise UsageError(f"layer {name!r} ({kind}) {reason}")


def _with_dropouts(splits: Mapping[str, Split], modules: Mapping[str, nn.Module]) -> ParallelPlan:
    """Return the plan with the dropouts inside pairs. Raises UsageError for parts that nobody gives, or takes."""
    layers = list[tuple[str, Split]]()
    giver: tuple[str, Split] | None = None
    weighted = ""  # the first layer with weights of its own behind the giver
    for name, module in modules.items():
        split = splits.get(name)
        if split is None:
            if giver is not None and any(tensor.requires_grad for tensor in module.parameters(recurse=False)):
                weighted = weighted or f"{name!r} ({type(module).__name__})"
            if giver is not None and type(module) is nn.Dropout:
                kind = KINDS.get((type(modules[giver[0]]), giver[1].how), object)
                dim = 1 if issubclass(kind, ColumnParallelConvolution) else -1
                layers.append((name, Split(DROPOUT, giver[1].ranks, dim=dim)))
            continue
        layers.append((name, split))
        if split.how == DROPOUT or split.ranks == 1:
            continue
        if split.takes == PART:
            if giver is None:
                raise UsageError(
                    f"layer {name!r} takes a part, which no layer before it gives: leave away 'takes part'"
                )
            if giver[1].ranks != split.ranks:
                raise UsageError(
                    f"layer {name!r} takes parts of {split.ranks} ranks, and {giver[0]!r} gives those of "
                    f"{giver[1].ranks}: use one size for both"
                )
            if weighted:
                raise UsageError(
                    f"layer {weighted} has weights, and stands between {giver[0]!r}, which gives a part of its group's "
                    f"samples, and {name!r}, which takes it: leave away 'gives part' and 'takes part'"
                )
            giver = None
        if split.gives == PART:
            weighted, giver = "", (name, split)
    if giver is not None:
        raise UsageError(f"layer {giver[0]!r} gives a part, which no layer after it takes: leave away 'gives part'")
    return ParallelPlan(tuple(layers))


def _check_ties(plan: ParallelPlan, model: nn.Module) -> None:
    """Raise UsageError where a weight belongs to two layers that do not cut it alike."""
    cuts: dict[int, tuple[str, tuple[int, int] | None]] = {}
    for name, module in model.named_modules():
        split = plan.get(name)
        parts = {} if split is None or split.ranks == 1 or split.how == DROPOUT else parts_of(module, split, 0)
        for parameter, tensor in module.named_parameters(recurse=False):
            own = (parts[parameter].ranks, parts[parameter].dim) if parameter in parts else None
            other, before = cuts.setdefault(id(tensor), (f"{name}.{parameter}", own))
            if before != own or (own is not None and other != f"{name}.{parameter}" and len(tensor) % own[0]):
                raise UsageError(
                    f"{name}.{parameter} and {other} are one weight, but are not split alike: split both over the same "
                    "ranks and dimension, which they divide, or neither"
                )
