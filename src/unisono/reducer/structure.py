"""Record of a model's parameters, compared with those of other ranks, and with those that it has later.

    rank 0   0.weight (4, 4) float32   1.weight (2, 4) float32   hash ─┐ one number is compared
    rank 1   0.weight (4, 4) float32   1.weight (3, 4) float32   hash ─┘ only if it differs, all descriptions are

    known       body.weight  body.bias                  their gradients are averaged
    now         body.weight  body.bias  head.weight     head.weight is trained, but its gradient would not be averaged

In one model parameters are compared by identity, module by module, without their names: about 20 us for a ResNet-50.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, zip_longest
from operator import attrgetter, is_

import torch

from unisono.errors import MismatchError, UsageError
from unisono.world import World

MAX_SHORT_BYTES, MOST_TOGETHER = 1 << 20, 64
"""Bytes of the longest tensor that is broadcast together with others, and how many of them are."""

_children, _parameters = attrgetter("_modules"), attrgetter("_parameters")
_trains, _form = attrgetter("requires_grad"), attrgetter("shape", "dtype")


class Structure:
    """Trainable parameters of `model`, which is not kept alive."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.names, self.parameters = trainable(model)
        """Names and tensors of the trainable parameters, each under its first name."""
        self._forms = list(map(_form, self.parameters))
        self.known = {id(parameter) for parameter in self.parameters}
        """Ids of the trainable parameters."""
        self.remedy = (
            "call unisono.parallel(model, world) again, on all ranks, and make a new Trainer if one trains the model"
        )
        """Remedy that the error of `check` names."""
        self._checked = False  # whether `check` has found nothing since the last pass
        self._remember(model)

    def check(self, model: torch.nn.Module) -> None:
        """Raise UsageError when a parameter is trained that was not when the model was made parallel, or has another
        shape or dtype."""
        self._checked = False
        if (forms := list(map(_form, self.parameters))) != self._forms:
            for key, now, before in zip(self.names, forms, self._forms, strict=True):
                if now != before:
                    raise UsageError(
                        f"parameter {key} is {tuple(now[0])} of {now[1]}, and was {tuple(before[0])} of {before[1]} "
                        "when the model was made parallel: convert or resize the model before unisono.parallel, or "
                        "give it a new torch.nn.Parameter and call unisono.parallel again"
                    )
        if (name := self.added(model)) is not None:
            raise UsageError(
                f"parameter {name} was added, replaced or unfrozen after the model was made parallel, so its gradient "
                f"would not be averaged: {self.remedy}"
            )
        self._checked = True

    def check_pass(self, model: torch.nn.Module | None) -> None:
        """Check the model of a backward pass that begins, unless its forward pass has done so, or the model is gone."""
        if not self._checked and model is not None:
            self.check(model)
        self._checked = False

    def added(self, model: torch.nn.Module) -> str | None:
        """Return the name of a parameter that is trained now and was not known; None when there is none."""
        if _identical(_members([model, *self._modules]), self._seen) and not any(map(_trains, self._frozen)):
            return None
        names, parameters = trainable(model)
        for name, parameter in zip(names, parameters, strict=True):
            if id(parameter) not in self.known and isinstance(parameter, torch.nn.Parameter):
                return name
        if all(
            isinstance(parameter, torch.nn.Parameter) for parameter in parameters
        ):  # else `functional_call` lends others
            self._remember(model)
        return None

    def differs(self, model: torch.nn.Module) -> bool:
        """Return True where the parameters trained now are not the known ones."""
        return not _identical(trainable(model)[1], self.parameters)

    def _remember(self, model: torch.nn.Module) -> None:
        modules = list(model.modules())
        self._modules = modules[1:]  # without the model itself
        self._seen = list(_members(modules))
        self._frozen = [parameter for parameter in model.parameters() if id(parameter) not in self.known]


def trainable(model: torch.nn.Module) -> tuple[list[str], list[torch.nn.Parameter]]:
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return list(named), list(named.values())


def _members(modules: Sequence[torch.nn.Module]) -> Iterable[object]:
    """Return the children and the parameters of modules."""
    dicts = chain(map(_children, modules), map(_parameters, modules))
    return chain.from_iterable(map(dict.values, dicts))


def _identical(present: Iterable[object], remembered: Sequence[object]) -> bool:
    return all(is_(now, before) for now, before in zip_longest(present, remembered, fillvalue=_identical))


Description = Sequence[str]
"""Names of tensors, each with the properties that must be equal on all ranks."""

REMEDY = "build the same model on every rank, on the same kind of device, from the same options and in the same order"


def compare_models(model: torch.nn.Module, world: World, plan: Mapping[str, object] | None = None) -> None:
    """Raise MismatchError on all ranks where kinds of device, names, shapes, strides, dtypes, frozen ones or splits of
    the plan differ."""
    if world.size == 1:
        return
    kinds = sorted({tensor.device.type for tensor in (*model.parameters(), *model.buffers())})
    description = [*(f"tensors on {kind}" for kind in kinds), *describe(model)]
    description += sorted(f"layer {name} split by {split}" for name, split in (plan or {}).items())
    checksum = int.from_bytes(hashlib.sha256(repr(description).encode()).digest()[:7], "little")
    largest = world.allreduce(torch.tensor([checksum, -checksum], device="cpu"), op="maximum")
    if int(largest[0]) != -int(largest[1]):
        raise MismatchError(difference(world.all_gather_object(description)))


@torch.no_grad()
def broadcast_all(tensors: Iterable[torch.Tensor], world: World) -> None:
    """Copy rank 0's tensors to all ranks, in place. Short ones of a dtype and a device go together: a network has
    hundreds, and each broadcast takes as long as its messages."""
    if world.size == 1:
        return
    short = defaultdict[tuple[torch.dtype, torch.device], list[torch.Tensor]](list)
    for tensor in tensors:
        is_short = tensor.layout is torch.strided and tensor.nbytes <= MAX_SHORT_BYTES
        if is_short and not tensor.is_inference():  # into which nothing can be copied
            short[tensor.dtype, tensor.device].append(tensor)
        else:
            world.broadcast(tensor)
    for alike in short.values():
        for start in range(0, len(alike), MOST_TOGETHER):
            some = alike[start : start + MOST_TOGETHER]
            sent = world.broadcast(torch.cat([tensor.reshape(-1) for tensor in some]))
            for tensor, content in zip(some, torch.split(sent, [tensor.numel() for tensor in some]), strict=True):
                tensor.copy_(content.view(tensor.shape))


def digest(tensors: Iterable[torch.Tensor]) -> int:
    """Return a number below 2**52 that tensors with other bits do not share, but by chance."""
    content = hashlib.sha256()
    for tensor in tensors:
        content.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return int.from_bytes(content.digest()[:8], "little") >> 12


def describe(model: torch.nn.Module) -> Description:
    """Return the parameters and buffers of a model in order. A tensor with several names is listed under each."""
    parameters = [(f"parameter {name}", tensor) for name, tensor in model.named_parameters(remove_duplicate=False)]
    buffers = [(f"buffer {name}", tensor) for name, tensor in model.named_buffers(remove_duplicate=False)]
    lines, first = list[str](), dict[int, str]()
    for name, tensor in (*parameters, *buffers):
        dense = torch.empty_like(tensor, device="meta")  # gradients lie in buckets in this order
        order = "" if dense.is_contiguous() else f" with strides {dense.stride()}"
        frozen = ", frozen" if isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad else ""
        same = "" if first.setdefault(id(tensor), name) == name else f", the same as {first[id(tensor)]}"
        dtype = str(tensor.dtype).removeprefix("torch.")
        lines.append(f"{name}, {tuple(tensor.shape)} of {dtype}{order}{frozen}{same}")
    return lines


def difference(descriptions: Sequence[Description]) -> str:
    """Return a message with the first difference between rank 0's model and another rank's."""
    for rank, description in enumerate(descriptions):
        for first, second in zip_longest(descriptions[0], description, fillvalue="no more"):
            if first != second:
                return (
                    f"the models of ranks 0 and {rank} differ: rank 0 has {first}, rank {rank} has {second}: {REMEDY}"
                )
    return f"the models differ: {REMEDY}"
