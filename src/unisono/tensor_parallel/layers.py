"""Layers that are split over a model group: a model's own modules, which become another class and hold a part.

    nn.Linear(8, 12), weight (12, 8)  ── become ──▶  ColumnParallelLinear(8, 12), weight (6, 8) on each of two ranks

    y = x W' + b,  2 ranks                   4 ranks, 8 ─▶ 12 features, b samples each, n = 8 bytes a float64

    column   W (12, 8) = [W0; W1]            weight (3, 8), bias (3) on each
             y = [x W0', x W1']              x to all: 4 b 8 n x 3/4;  y to its samples' rank: 4 b 12 n x 3/16

    row      W (12, 8) = [W0, W1]            weight (12, 2) on each, bias (12) on all
             y = x0 W0' + x1 W1'             x to its part's rank: 4 b 8 n x 3/16;  sum of y: 4 b 12 n x 3/4

A backward pass sends as much as the forward pass. A column that gives its part and a row that takes it are a pair: x to
all, then the sum of y, and nothing between (Megatron-LM section 3). Convolutions are split by output channels (PCL-DNN
section 3.2: by feature maps), embeddings by rows. Names, modules and parameters stay the same objects, so optimizers
and tied weights still refer to them; `load_state_dict` takes whole tensors, of which each rank cuts its part.

A dropout's random numbers follow from (seed, step, sample, layer), whatever the ranks and the split:

    sample 5 of a step, dropout layer 2, 8 features       mask 1 0 1 1 0 1 1 1
    the same, features split over 2 ranks                 rank 0: 1 0 1 1      rank 1: 0 1 1 1

A sample has its number in the batch of all ranks, so the same sample gets the same mask on any rank. Every rank draws
the numbers of whole samples and takes its part. A layer that is called twice in a step draws the same numbers again; so
does a recomputation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from unisono.errors import UsageError
from unisono.tensor_parallel.layouts import PARTIAL, WHOLE, GroupLink, SampleNumbers, change_layout
from unisono.tensor_parallel.plan import COLUMN, OWN, PART, ROW, Split


class WeightPart(NamedTuple):
    """Part `member` of `ranks` equal parts of a tensor whose dimension `dim` has the length `length`.

        weight (10, 3) of an Embedding, by rows over 4 ranks      rows of 10 / 4, rounded up: 3

        rank 0  rows 0 1 2      rank 1  rows 3 4 5      rank 2  rows 6 7 8      rank 3  row 9 and two rows of zeros

    Parts are equal, so that all ranks have the same buckets. What is missing in the last is zeros, which nothing reads.
    """

    ranks: int
    member: int
    dim: int
    length: int

    @property
    def size(self) -> int:
        """Length of each part in its dimension."""
        return -(-self.length // self.ranks)

    @property
    def start(self) -> int:
        """First element of this part in its dimension."""
        return self.member * self.size

    def whole_shape(self, part: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the tensor that a tensor of shape `part` is a part of."""
        return (*part[: self.dim], self.length, *part[self.dim + 1 :])

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Return a copy of this rank's part of a tensor, filled up with zeros."""
        shape = (*whole.shape[: self.dim], self.size, *whole.shape[self.dim + 1 :])
        part = torch.zeros(shape, dtype=whole.dtype, device=whole.device)
        mine = whole.narrow(self.dim, min(self.start, self.length), max(0, min(self.size, self.length - self.start)))
        part.narrow(self.dim, 0, mine.shape[self.dim]).copy_(mine)
        return part

    def join(self, parts: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor from all parts, stacked in the order of ranks: (ranks, *shape of a part)."""
        return torch.cat(parts.unbind(), self.dim).narrow(self.dim, 0, self.length).contiguous()


Features = tuple[str, str]
"""Number that a layer's parts share evenly: its attribute, and what it counts."""


class ParallelLayer(nn.Module):
    """Base of the layers that are split: their products are between two changes of layout (`layouts.py`)."""

    split: Split
    link: GroupLink
    parts: dict[str, WeightPart]
    """Parts that this rank holds, by the names of parameters."""
    dim: ClassVar[int] = 0
    """Dimension along which its weight is cut."""
    inputs: ClassVar[Features | None] = None
    """Number that parts of its input share; None: its input is never a part."""
    outputs: ClassVar[Features]
    """Number that parts of its output share."""

    @classmethod
    def refusal(cls, layer: Any, split: Split) -> str | None:
        """Return why a layer cannot be split so, with the remedy; None where it can."""
        if split.takes == PART and cls.inputs is None:
            return "takes inputs of own samples: leave away 'takes part'"
        shared = [cls.outputs] if split.how == COLUMN or split.gives == PART else []
        if cls.inputs is not None and (split.how == ROW or split.takes == PART):
            shared.append(cls.inputs)
        reasons = (uneven(getattr(layer, attribute), words, split.ranks) for attribute, words in shared)
        return next(filter(None, reasons), None)


class ColumnParallelLinear(ParallelLayer, nn.Linear):
    """Linear layer of which each rank has some output features: weight (out / G, in), bias (out / G)."""

    inputs, outputs = ("in_features", "input features"), ("out_features", "output features")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  PyTorch's
        """Return the output, (b, ..., out) or a part of the group's, for (b, ..., in) or a part of the group's."""
        x = change_layout(input, self.link, self.split.takes, WHOLE)
        y = functional.linear(x, self.weight, self.bias)
        return change_layout(y, self.link, PART, self.split.gives)


class RowParallelLinear(ParallelLayer, nn.Linear):
    """Linear layer of which each rank has some input features: weight (out, in / G), bias (out)."""

    dim, inputs, outputs = 1, ColumnParallelLinear.inputs, ColumnParallelLinear.outputs

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  PyTorch's
        """Return the output, (b, ..., out) or a part of the group's, for (b, ..., in) or a part of the group's."""
        partial = functional.linear(change_layout(input, self.link, self.split.takes, PART), self.weight)
        y = change_layout(partial, self.link, PARTIAL, self.split.gives)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class ColumnParallelConvolution(ParallelLayer):
    """Convolution of which each rank has some output channels: weight (out / G, in, ...), bias (out / G)."""

    weight: Tensor
    bias: Tensor | None
    outputs = ("out_channels", "output channels")

    @classmethod
    def refusal(cls, layer: Any, split: Split) -> str | None:
        """Return why a layer cannot be split so."""
        grouped = f"has {layer.groups} groups of channels: leave it whole" if layer.groups != 1 else None
        return grouped or super().refusal(layer, split)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  PyTorch's
        """Return the output, (b, out, ...) or this rank's channels of the group's, for (b, in, ...)."""
        x = change_layout(input, self.link, OWN, WHOLE)
        y: Tensor = self._conv_forward(x, self.weight, self.bias)  # type: ignore[operator]
        return change_layout(y, self.link, PART, self.split.gives, 1)


class ColumnParallelConv1d(ColumnParallelConvolution, nn.Conv1d):
    """Convolution over (b, channels, length)."""


class ColumnParallelConv2d(ColumnParallelConvolution, nn.Conv2d):
    """Convolution over (b, channels, height, width)."""


class ColumnParallelConv3d(ColumnParallelConvolution, nn.Conv3d):
    """Convolution over (b, channels, depth, height, width)."""


class RowParallelEmbedding(ParallelLayer, nn.Embedding):
    """Embedding of which each rank has some rows: weight (rows / G, rounded up, d).

    10 rows, 4 ranks: 0-2, 3-5, 6-8, 9          numbers    4        9        4
                                                rank 1     row 4    0        row 4   ┐
                                                rank 3     0        row 9    0       ┴ sum: to the rank of the sample
    """

    outputs = ("embedding_dim", "features")

    @classmethod
    def refusal(cls, layer: Any, split: Split) -> str | None:
        """Return why a layer cannot be split so."""
        if layer.max_norm is not None or layer.sparse or layer.scale_grad_by_freq:
            return "has max_norm, sparse or scale_grad_by_freq, which need whole weights: leave it whole"
        if split.ranks > layer.num_embeddings:
            return f"has {layer.num_embeddings} rows for {split.ranks} ranks: use a smaller group"
        return super().refusal(layer, split)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  PyTorch's
        """Return vectors, (b, ..., d) or this rank's part of the group's, for int numbers (b, ...)."""
        if input.numel() and not 0 <= int(input.min()) <= int(input.max()) < self.num_embeddings:
            raise IndexError(f"numbers {int(input.min())} to {int(input.max())} in {self.num_embeddings} rows")
        part = self.parts["weight"]
        local = change_layout(input, self.link, OWN, WHOLE) - part.start
        elsewhere = (local < 0) | (local >= part.size)
        padding = None if self.padding_idx is None else self.padding_idx - part.start
        own = padding if padding is not None and 0 <= padding < part.size else None
        partial = functional.embedding(local.masked_fill(elsewhere, 0), self.weight, own)
        return change_layout(partial.masked_fill(elsewhere.unsqueeze(-1), 0), self.link, PARTIAL, self.split.gives)


KINDS: Mapping[tuple[type[nn.Module], str], type[ParallelLayer]] = {
    (nn.Linear, COLUMN): ColumnParallelLinear,
    (nn.Linear, ROW): RowParallelLinear,
    (nn.Conv1d, COLUMN): ColumnParallelConv1d,
    (nn.Conv2d, COLUMN): ColumnParallelConv2d,
    (nn.Conv3d, COLUMN): ColumnParallelConv3d,
    (nn.Embedding, ROW): RowParallelEmbedding,
}
"""Classes of split layers, by the exact class of the whole layer and the split."""


def parts_of(layer: nn.Module, split: Split, member: int) -> dict[str, WeightPart]:
    """Return the parts of a whole layer's parameters that a member of a group holds. Pure: for any number of ranks.

    A bias is whole where the sum of the ranks' products is.
    """
    cuts = {"weight": KINDS[type(layer), split.how].dim}
    cuts |= {"bias": 0} if split.how == COLUMN or split.gives == PART else {}
    named = [(name, cuts[name], tensor) for name, tensor in layer.named_parameters(recurse=False) if name in cuts]
    return {name: WeightPart(split.ranks, member, dim, tensor.shape[dim]) for name, dim, tensor in named}


def become(layer: nn.Module, split: Split, link: GroupLink, parts: dict[str, WeightPart], cut: set[int]) -> None:
    """Make a layer one that is split, and holds `parts`. `cut` has the ids of tied parameters that are cut already."""
    layer.__class__ = KINDS[type(layer), split.how]
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


def _check_samples(layer: Any, inputs: tuple[Any, ...]) -> None:
    """Raise UsageError for an input without a dimension of samples, whose layout cannot change."""
    least = 1 if isinstance(layer, nn.Embedding) else layer.weight.ndim
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


def uneven(length: int, words: str, ranks: int) -> str | None:
    """Return the reason where `ranks` ranks cannot share `length` features evenly, with sizes that can; else None.

    >>> uneven(10, "output features", 4)
    'has 10 output features, which 4 ranks cannot share evenly: groups of 2, 5, 10 ranks can'
    """
    if length % ranks == 0:
        return None
    fits = [str(size) for size in range(2, length + 1) if length % size == 0][:6]
    return f"has {length} {words}, which {ranks} ranks cannot share evenly: groups of {', '.join(fits)} ranks can"


WORD = (1 << 64) - 1


class SampleDropout(nn.Dropout):
    """Dropout of activations (samples, ...), whole or in parts along a dimension."""

    numbers: SampleNumbers
    layer: int
    """Number of the layer among the model's dropouts."""
    link: GroupLink | None = None
    """Model group of which the input is a part; None where it is of own samples."""
    dim: int = -1

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  PyTorch's
        """Return the activation with a share `p` of its elements set to 0, and the others divided by 1 - p."""
        if not self.training or self.p == 0:
            return input
        dim, shape, numbers = self.dim % input.ndim, list(input.shape), self._numbers(len(input))
        if self.link is not None:
            shape[dim] *= self.link.world.size
        mask, generator = torch.empty(shape, dtype=torch.float32), torch.Generator()
        for place, number in enumerate(numbers):
            generator.manual_seed(mixed(self.numbers.seed, self.numbers.step, number, self.layer) >> 1)
            torch.rand(shape[1:], generator=generator, out=mask[place])
        if self.link is not None:
            mask = mask.chunk(self.link.world.size, dim)[self.link.world.rank]
        scale = 1.0 / (1.0 - self.p) if self.p < 1 else 0.0
        return input * (mask >= self.p).to(input.dtype).mul_(scale)

    def _numbers(self, rows: int) -> list[int]:
        """Return the number of each row's sample in the batch of all ranks."""
        if self.link is None:
            first = self.numbers.first_of(rows)
            return list(range(first, first + rows))
        return [first + place for first in self.link.firsts for place in range(self.link.block)]


def mixed(*numbers: int) -> int:
    """Return a 64-bit hash of numbers, by the mixing of SplitMix64 (Steele, Lea and Flood 2014)."""
    state = 0
    for number in numbers:
        state = (state + number * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & WORD
        state ^= state >> 31
    return state


def use_sample_dropout(model: nn.Module, numbers: SampleNumbers) -> dict[str, SampleDropout]:
    """Make the model's dropouts draw from `numbers`. Return them by name; modules and names stay."""
    dropouts = dict[str, SampleDropout]()
    for name, module in model.named_modules():
        if type(module) is nn.Dropout:
            module.__class__ = SampleDropout
            assert isinstance(module, SampleDropout)
            module.numbers, module.layer, module.inplace = numbers, len(dropouts), False
            dropouts[name] = module
    return dropouts
