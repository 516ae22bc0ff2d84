"""Layers that are split over a model group: a model's own modules, which become another class and hold a part.

    nn.Linear(8, 12), weight (12, 8)  ── become ──▶  ColumnParallelLinear(8, 12), weight (6, 8) on each of two ranks

A column that gives its part and a row that takes it are a pair: x to all, then the sum of y, and nothing between
(Megatron-LM section 3). Names, modules and parameters stay the same objects, so optimizers and tied weights still refer
to them; `load_state_dict` takes whole tensors, of which each rank cuts its part. `docs/tensor_parallel.md` draws the
parts of weights, and the masks of dropouts, which follow from (seed, step, sample, layer).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from unisono.errors import UsageError
from unisono.plan.layer_plan import COLUMN, DROPOUT, HEADS, OWN, PART, ROW, Split
from unisono.tensor_parallel.layouts import PARTIAL, WHOLE, GroupLink, SampleNumbers, change_layout


class WeightPart(NamedTuple):
    """Part `member` of `ranks` equal parts of a tensor of the shape `shape`, along its dimension `dim`.

    Parts are equal, so that all ranks have the same buckets. What is missing in the last is zeros, which nothing reads.
    """

    ranks: int
    member: int
    dim: int
    shape: torch.Size
    blocks: int = 1
    """Equal blocks of its dimension, each of which is cut: 3 where one weight is that of query, key and value."""

    @property
    def size(self) -> int:
        """Length of each part of a block in its dimension."""
        return -(-self.shape[self.dim] // self.blocks // self.ranks)

    @property
    def start(self) -> int:
        """First element of this part of a block in its dimension."""
        return self.member * self.size

    def cut(self, value: Any) -> Any:
        """Return a copy of this rank's part of a whole tensor, filled up with zeros; other values as they are."""
        if not isinstance(value, Tensor) or value.shape != self.shape:
            return value
        piece = torch.unflatten(value, self.dim, (self.blocks, -1)).movedim(self.dim + 1, 0)[self.start :][: self.size]
        part = value.new_zeros([*value.shape[: self.dim], self.blocks, self.size, *value.shape[self.dim + 1 :]])
        part.movedim(self.dim + 1, 0)[: len(piece)] = piece
        return part.flatten(self.dim, self.dim + 1)


class ParallelLayer(nn.Module):
    """Base of the layers that are split: their products are between two changes of layout (`layouts.py`)."""

    split: Split = Split(DROPOUT, ranks=1)
    link: Any = None
    """GroupLink with its group; None: the layer is whole."""
    numbers: SampleNumbers
    layer: int
    """Number of the layer among those of the model that drop activations."""
    parts: Mapping[str, WeightPart] = {}
    """Parts that this rank holds, by the names of parameters."""
    cuts: ClassVar[Mapping[str, tuple[int, int]]] = {"weight": (0, 1)}
    """Dimension along which each weight is cut, and the number of its blocks, by its name."""
    layouts: ClassVar[tuple[str, str]] = WHOLE, PART
    """Layouts of what its products take and give."""
    features: ClassVar[int] = -1
    """Dimension of its output's features."""
    inputs: ClassVar[str] = ""
    """Attribute with the number that parts of its input share evenly; empty: it is never a part."""
    outputs: ClassVar[str]
    """Attribute with the number that parts of its output share evenly."""
    options: ClassVar[Mapping[str, Any]] = {}
    """Attributes, with the value that a layer has to have to be split."""

    @classmethod
    def refusal(cls, layer: Any, split: Split) -> str | None:
        """Return why a layer cannot be split so, with the remedy; None where it can."""
        if split.takes == PART and not cls.inputs:
            return "takes inputs of own samples: leave away 'takes part'"
        names = (cls.cuts, dict(layer.named_parameters()))
        needed, given = ({name for name in each if not name.endswith("bias")} for each in names)
        if needed - given and split.how != DROPOUT:
            return f"has {', '.join(sorted(given))}, not {' and '.join(sorted(needed))}: leave it whole"
        for name, value in cls.options.items():
            if (own := getattr(layer, name)) != value:
                return f"has {name} = {'a weight' if isinstance(own, Tensor) else own}: leave it whole"
        shared = [cls.outputs] if split.how in (COLUMN, HEADS) or split.gives == PART else []
        shared += [cls.inputs] if cls.inputs and (split.how == ROW or split.takes == PART) else []
        for name in shared:
            if (length := getattr(layer, name)) % split.ranks:
                fits = ", ".join([str(size) for size in range(2, length + 1) if length % size == 0][:6])
                return f"has {name} = {length}, which {split.ranks} ranks cannot share evenly: groups of {fits} can"
        return None

    def drop_out(self, x: Tensor, p: float, dim: int) -> Tensor:
        """Return an activation, or its part along `dim`, in training with a share `p` of it 0, the rest over 1 - p."""
        if not self.training or p == 0:
            return x
        recomputes, step = torch._C._current_graph_task_id() != -1, self.numbers.step  # a pass with gradients
        if self.numbers.counts and step == self.numbers.ended == getattr(self, "drawn", None) and not recomputes:
            raise UsageError("dropouts count calls of the model in training mode: else call seed_dropout each step")
        self.drawn = getattr(self, "drawn", None) if recomputes else step  # of the last mask, while no call runs
        shape, ranks, member, step = list(x.shape), self.split.ranks, 0, step % (1 << 32) if recomputes else step
        firsts, rows = [self.numbers.first_of(len(x))], len(x)
        if self.link is not None:
            self.link.check(x)
            firsts, rows, member = self.link.firsts, max(self.link.rows), self.link.world.rank
        shape[dim] *= ranks
        mask, generator = torch.empty(shape, dtype=torch.float32, device="cpu"), torch.Generator()
        for place, sample in enumerate(first + row for first in firsts for row in range(rows)):
            draw = np.random.SeedSequence((self.numbers.seed % (1 << 64), step, sample, self.layer))
            generator.manual_seed(int(draw.generate_state(1, np.uint64)[0] >> 1))
            torch.rand(shape[1:], generator=generator, out=mask[place], device="cpu")
        return x * (mask.chunk(ranks, dim)[member] >= p).to(x.device, x.dtype).mul_(1 / (1 - p) if p < 1 else 0.0)

    def multiply(self, x: Tensor) -> Tensor:
        """Return this rank's part of the output, or of the sum that is the output."""
        return super().forward(x)  # type: ignore[no-any-return]

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  PyTorch's
        """Return the output for own samples, (b, ...), or a part of the group's: of the same, or a part."""
        taken, given = self.layouts
        y = self.multiply(change_layout(input, self.link, self.split.takes, taken))
        y = change_layout(y, self.link, given, self.split.gives, self.features)
        bias = getattr(self, "bias", None) if given == PARTIAL else None  # which the ranks' sum lacks
        return y if bias is None else y + bias.to(y.dtype)


class ColumnParallelLinear(ParallelLayer, nn.Linear):
    """Linear layer of which each rank has some output features: weight (out / G, in), bias (out / G)."""

    inputs, outputs = "in_features", "out_features"


class RowParallelLinear(ParallelLayer, nn.Linear):
    """Linear layer of which each rank has some input features: weight (out, in / G), bias (out)."""

    layouts, cuts = (PART, PARTIAL), {"weight": (1, 1)}
    inputs, outputs = "in_features", "out_features"

    def multiply(self, x: Tensor) -> Tensor:
        """Return this rank's part of the sum, without the bias."""
        return functional.linear(x, self.weight)


class ColumnParallelConvolution(ParallelLayer):
    """Convolution of which each rank has some output channels: weight (out / G, in, ...), bias (out / G)."""

    features, outputs, options = 1, "out_channels", {"groups": 1}


class RowParallelEmbedding(ParallelLayer, nn.Embedding):
    """Embedding of which each rank has some rows: weight (rows / G, rounded up, d). It gives zeros for the numbers of
    others' rows, so the ranks' sum has each sample's vectors."""

    layouts, outputs = (WHOLE, PARTIAL), "embedding_dim"
    options: ClassVar[Mapping[str, Any]] = {"max_norm": None, "sparse": False, "scale_grad_by_freq": False}

    def multiply(self, x: Tensor) -> Tensor:
        """Return the vectors that this rank has, and zeros for those of other ranks."""
        if x.numel() and not 0 <= int(x.min()) <= int(x.max()) < self.num_embeddings:
            raise IndexError(f"numbers {int(x.min())} to {int(x.max())} in {self.num_embeddings} rows")
        part = self.parts["weight"]
        local = x - part.start
        elsewhere = (local < 0) | (local >= part.size)
        padding = -1 if self.padding_idx is None else self.padding_idx - part.start
        local_padding = padding if 0 <= padding < part.size else None
        vectors = functional.embedding(local.masked_fill(elsewhere, 0), self.weight, local_padding)
        return vectors.masked_fill(elsewhere.unsqueeze(-1), 0)


class HeadParallelAttention(ParallelLayer, nn.MultiheadAttention):
    """Attention of which each rank has some heads: their rows for query, key and value of in_proj_weight, (3 E / G, E),
    and out_proj.weight (E, E / G). A mask (L, S) is that of all of the group's samples."""

    cuts, outputs = {"in_proj_weight": (0, 3), "in_proj_bias": (0, 3), "out_proj.weight": (1, 1)}, "num_heads"
    options: ClassVar[Mapping[str, Any]] = {"bias_k": None, "add_zero_attn": False, "batch_first": True}

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the outputs for own samples and, with `need_weights`, the keys' weights, as a whole attention does."""
        if self.link is not None:
            self.link.exchanges += bool(need_weights)  # that of the weights
        elif query.ndim < 3 or not self.training:  # no samples, or nothing to drop
            given = key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            return nn.MultiheadAttention.forward(self, query, key, value, *given)
        if is_causal and attn_mask is None:
            raise UsageError("is_causal = True says what attn_mask is, and there is none: pass the mask, too")
        mask, padding = (
            torch.where(each, -torch.inf, 0.0).to(query) if each is not None and each.dtype == torch.bool else each
            for each in (attn_mask, key_padding_mask)
        )
        if mask is not None and (mask.ndim == 3 or mask.requires_grad):  # whose gradient is that of own samples
            mask = torch.unflatten(mask.expand(len(query) * self.num_heads, -1, -1), 0, (-1, self.num_heads))
            mask = change_layout(mask, self.link, OWN, PART, 1)
        if padding is not None:
            padding = change_layout(padding[:, None, None], self.link, OWN, WHOLE)
            mask = padding if mask is None else mask + padding
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        wholes = (change_layout(x, self.link, OWN, WHOLE) for x in (query, key, value))
        q, k, v = (
            torch.unflatten(functional.linear(x, weight, bias), -1, (-1, self.head_dim)).transpose(1, 2)
            for x, weight, bias in zip(wholes, self.in_proj_weight.chunk(3), biases, strict=True)
        )
        if need_weights or (self.training and self.dropout):
            scores = q @ k.mT * self.head_dim**-0.5
            weights = self.drop_out(torch._safe_softmax(scores if mask is None else scores + mask, -1), self.dropout, 1)
            y = weights @ v
        else:
            y = functional.scaled_dot_product_attention(q, k, v, mask)
        y = functional.linear(y.transpose(1, 2).flatten(2), self.out_proj.weight)
        y = change_layout(y, self.link, PARTIAL, OWN)
        y = y if self.out_proj.bias is None else y + self.out_proj.bias.to(y.dtype)
        if not need_weights:
            return y, None
        weights = change_layout(weights, self.link, PART, OWN, 1)
        return y, weights.mean(1) if average_attn_weights else weights


class SampleDropout(ParallelLayer, nn.Dropout):
    """Dropout of activations (samples, ...), whole or in parts along a dimension."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  PyTorch's
        """Return the activation with a share `p` of its elements set to 0, and the others divided by 1 - p."""
        y = self.drop_out(input, self.p, self.split.dim)
        return input.copy_(y) if self.inplace and y is not input else y


KINDS: Mapping[tuple[type[nn.Module], str], type[ParallelLayer]] = {
    (nn.Linear, COLUMN): ColumnParallelLinear,
    (nn.Linear, ROW): RowParallelLinear,
    (nn.Embedding, ROW): RowParallelEmbedding,
    (nn.MultiheadAttention, HEADS): HeadParallelAttention,
    (nn.Dropout, DROPOUT): SampleDropout,
} | {
    (kind, COLUMN): type(f"ColumnParallel{kind.__name__}", (ColumnParallelConvolution, kind), {})
    for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)
}
"""Classes of split layers, by the exact class of the whole layer and the split."""


def parts_of(layer: nn.Module, split: Split, member: int) -> dict[str, WeightPart]:
    """Return the parts of a whole layer's parameters that a member of a group holds. Pure: for any number of ranks. A
    bias is whole where the sum of the ranks' products is."""
    part, own = partial(WeightPart, split.ranks, member), dict(layer.named_parameters())
    cuts = dict(KINDS[type(layer), split.how].cuts)
    cuts |= {"bias": (0, 1)} if split.how == COLUMN or split.gives == PART else {}
    return {name: part(dim, own[name].shape, blocks) for name, (dim, blocks) in cuts.items() if name in own}


def become(layer: nn.Module, split: Split, link: GroupLink, parts: dict[str, WeightPart], path: str = "") -> None:
    """Make the layer `path` a split layer that holds `parts`. A tied parameter that is cut already stays."""
    layer.__class__ = KINDS[type(layer), split.how]
    assert isinstance(layer, ParallelLayer)
    layer.split, layer.link, layer.parts = split, link, parts
    for name, part in parts.items():
        parameter = layer.get_parameter(name)
        parameter.data, parameter.grad = part.cut(parameter.data), None
    if parts:
        layer.register_load_state_dict_pre_hook(_cut_whole)  # type: ignore[no-untyped-call]
        # a module with hooks is called: PyTorch's fused transformer layer would read its weight instead
        layer.register_forward_pre_hook(partial(_begin_layer, f" in layer {path}"))


def _begin_layer(label: str, layer: Any, inputs: tuple[Any, ...]) -> None:
    """Label the exchanges of a layer. Raise UsageError for an input without samples, whose layout cannot change."""
    layer.link.label = label
    least = 1 if isinstance(layer, nn.Embedding) else 3 if layer.split.how == HEADS else layer.weight.ndim
    if inputs and isinstance(inputs[0], Tensor) and inputs[0].ndim < least:
        takes = f"a split {type(layer).__name__} takes (samples, ...), {least} dimensions or more"
        raise UsageError(f"{takes}, and got {tuple(inputs[0].shape)}: call it with a batch")


def _cut_whole(layer: Any, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Replace whole tensors by this rank's parts, before they are loaded."""
    state.update({key: part.cut(state[key]) for name, part in layer.parts.items() if (key := prefix + name) in state})


def use_sample_dropout(model: nn.Module, numbers: SampleNumbers) -> None:
    """Make the model's dropouts, and those of its attentions, draw from `numbers`; modules and names stay. The numbers
    of attentions come behind, last of those that drop nothing, which are here only where they are split."""
    whole = {nn.Dropout: Split(DROPOUT, 1), nn.MultiheadAttention: Split(HEADS, 1)}
    for module in model.modules():
        split = whole.get(type(module)) if getattr(module, "dropout", True) else None
        if split is not None and not (kind := KINDS[type(module), split.how]).refusal(module, split):
            module.__class__ = kind
    drawing = [module for module in model.modules() if isinstance(module, SampleDropout | HeadParallelAttention)]
    drawing.sort(key=lambda module: (isinstance(module, HeadParallelAttention), getattr(module, "dropout", 0) == 0))
    for index, module in enumerate(drawing):
        module.numbers, module.layer = numbers, index
