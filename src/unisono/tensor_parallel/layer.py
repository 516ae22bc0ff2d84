"""Layers that are split over a model group: a model's own modules, which become another class and hold a part.

    nn.Linear(8, 6), weight (6, 8)  ── become ──▶  ColumnParallelLinear(8, 6), weight (3, 8) on each of two ranks

Names, modules and parameters stay the same objects, so optimizers and tied weights still refer to them. Sizes such as
`out_features` stay those of the whole layer. `load_state_dict` takes whole tensors, and each rank cuts its own part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from unisono.errors import UsageError
from unisono.tensor_parallel.layouts import GroupLink
from unisono.tensor_parallel.part import WeightPart
from unisono.tensor_parallel.plan import Split
from unisono.world import World


class ParallelLayer(nn.Module, ABC):
    """Base of the layers that are split."""

    split: Split
    link: GroupLink
    parts: dict[str, WeightPart]
    """Parts that this rank holds, by the names of parameters."""
    by: ClassVar[str]
    """Split that the class carries out: "column" or "row"."""

    @property
    def least_dimensions(self) -> int:
        """Least dimensions of its input, samples and features."""
        return 2

    @classmethod
    @abstractmethod
    def dims(cls, split: Split) -> Mapping[str, int]:
        """Return the dimension along which each split parameter is cut, by name."""

    @classmethod
    @abstractmethod
    def refusal(cls, layer: Any, split: Split) -> str | None:
        """Return why a layer cannot be split so, with the remedy; None where it can."""

    @property
    def group(self) -> World:
        """World of the model group."""
        return self.link.world


def parts_of(kind: type[ParallelLayer], layer: nn.Module, split: Split, member: int) -> dict[str, WeightPart]:
    """Return the parts of a whole layer's parameters that a member of a model group holds. Pure: for any number of
    ranks."""
    named = dict(layer.named_parameters(recurse=False))
    return {
        name: WeightPart(split.ranks, member, dim, named[name].shape[dim])
        for name, dim in kind.dims(split).items()
        if name in named
    }


def become(
    layer: nn.Module,
    kind: type[ParallelLayer],
    split: Split,
    link: GroupLink,
    parts: dict[str, WeightPart],
    cut: set[int],
) -> None:
    """Make a layer one of a kind that holds `parts`. `cut` has the ids of tied parameters that are cut already."""
    layer.__class__ = kind
    assert isinstance(layer, ParallelLayer)
    layer.split, layer.link, layer.parts = split, link, parts
    for name, part in parts.items():
        parameter = layer.get_parameter(name)
        if id(parameter) not in cut:
            parameter.grad = None
            parameter.data = part.cut(parameter.data)
            cut.add(id(parameter))
    layer.register_load_state_dict_pre_hook(_cut_whole)  # type: ignore[no-untyped-call]
    # a module with hooks is called: PyTorch's fused transformer layer would read its weight instead
    layer.register_forward_pre_hook(_check_samples)


def _check_samples(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Raise UsageError for an input without a dimension of samples, whose layout cannot change."""
    assert isinstance(layer, ParallelLayer)
    least = layer.least_dimensions
    if inputs and isinstance(inputs[0], Tensor) and inputs[0].ndim < least:
        raise UsageError(
            f"a split {type(layer).__name__} takes (samples, ...), {least} dimensions or more, and got "
            f"{tuple(inputs[0].shape)}: call it with a batch"
        )


def _cut_whole(layer: nn.Module, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Replace whole tensors by this rank's parts, before they are loaded."""
    assert isinstance(layer, ParallelLayer)
    for name, part in layer.parts.items():
        value, own = state.get(prefix + name), layer.get_parameter(name)
        if value is not None and value.shape == part.whole_shape(own.shape):
            state[prefix + name] = part.cut(value)


def uneven(length: int, what: str, ranks: int) -> str | None:
    """Return the reason where `ranks` ranks cannot share `length` features evenly, with sizes that can; else None.

    >>> uneven(10, "output features", 4)
    'has 10 output features, which 4 ranks cannot share evenly: groups of 2, 5, 10 ranks can'
    """
    if length % ranks == 0:
        return None
    fits = [str(size) for size in range(2, length + 1) if length % size == 0][:6]
    return f"has {length} {what}, which {ranks} ranks cannot share evenly: groups of {', '.join(fits)} ranks can"
