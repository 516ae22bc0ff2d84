"""Styles of DTensor's `parallelize_module`, in words of a plan, where they say the same.

    ColwiseParallel()                                "column gives part"     Replicate ─▶ Shard(-1)
    ColwiseParallel(output_layouts=Shard(0))         "column"                Replicate ─▶ Shard(0)
    RowwiseParallel()                                "row takes part"        Shard(-1) ─▶ Replicate
    RowwiseParallel(input_layouts=Shard(0))          "row"                   Shard(0) ─▶ Replicate

Shard(0) is "own", and so is Replicate: each rank feeds its own samples, and the layer gathers those of its group.
Groups are all ranks, as of a mesh with one dimension. Activations that are split along a sequence have no words here.
"""

from __future__ import annotations

from typing import Any

from unisono.errors import UsageError

MODULE = "torch.distributed.tensor."
"""Beginning of the names of DTensor's modules."""


def is_style(value: object) -> bool:
    """Return True for a style of `parallelize_module`. Nothing of DTensor is imported."""
    return any(kind.__module__.startswith(MODULE) and kind.__name__ == "ParallelStyle" for kind in type(value).__mro__)


def words_of(style: Any, layer: str) -> str:
    """Return the words for a style of a layer. Raises UsageError for one that has none."""
    name = type(style).__name__
    how = {"ColwiseParallel": "column", "RowwiseParallel": "row"}.get(name)
    if how is None:
        raise UsageError(f"layer {layer!r}: {name} is not supported: use ColwiseParallel or RowwiseParallel")
    takes = _flow(style.input_layouts, layer, f"{name}(input_layouts=...)")
    gives = _flow(style.output_layouts, layer, f"{name}(output_layouts=...)")
    return " ".join([how, *(f"{verb} part" for verb, flow in (("takes", takes), ("gives", gives)) if flow == "part")])


def _flow(layouts: Any, layer: str, where: str) -> str:
    one = layouts[0] if isinstance(layouts, tuple) and len(layouts) == 1 else layouts
    if type(one).__name__ == "Replicate" or (type(one).__name__ == "Shard" and one.dim == 0):
        return "own"
    if type(one).__name__ == "Shard" and one.dim == -1:
        return "part"
    raise UsageError(f"layer {layer!r}: {where} is {layouts}; it has to be Replicate(), Shard(0) or Shard(-1)")
