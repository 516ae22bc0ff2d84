"""Plan of layers that are split over ranks: a small value, written by hand, as words, or as DTensor's styles.

    {"fc1": "column 2 gives part", "fc2": "row 2 takes part"}              a layer name: how, group size, what flows

    own samples ─▶ all to each ─▶ fc1, half of its outputs ─▶ a part each ─▶ fc2, half of its inputs ─▶ sum ─▶ own

"column" splits the outputs of a layer (features of Linear, channels of Conv), "row" its inputs (features of Linear,
rows of Embedding), as in Megatron-LM and DTensor. A layer takes and gives each rank's own samples unless the plan says
"takes part" or "gives part": then each rank has a part of the features of the group's samples, and nothing is sent
there. Each layer has a size of groups of its own; one that is left out is all ranks. "dropout" names a Dropout that
works on parts, along the dimension `dim`. Names may have wildcards, as in `layers.*.fc1`.

Styles of DTensor's `parallelize_module`, where they say the same:

    ColwiseParallel()                                "column gives part"     Replicate ─▶ Shard(-1)
    ColwiseParallel(output_layouts=Shard(0))         "column"                Replicate ─▶ Shard(0)
    RowwiseParallel()                                "row takes part"        Shard(-1) ─▶ Replicate
    RowwiseParallel(input_layouts=Shard(0))          "row"                   Shard(0) ─▶ Replicate

Shard(0) is "own", and so is Replicate: each rank feeds its own samples, and the layer gathers those of its group.
Groups are all ranks, as of a mesh with one dimension. Activations that are split along a sequence have no words here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from unisono.errors import UsageError

COLUMN, ROW, DROPOUT = "column", "row", "dropout"
HOWS = (COLUMN, ROW, DROPOUT)
OWN, PART = "own", "part"

AUTO = "auto"
"""Plan that is chosen by prediction (`choose_plan.py`)."""

STYLES = "torch.distributed.tensor."
"""Beginning of the names of DTensor's modules."""

FORM = '"column 2 gives part": column or row, the size of the group, "takes part" and "gives part"'


@dataclass(frozen=True)
class Split:
    """Split of one layer over the ranks of its model groups."""

    how: str
    """"column": by outputs; "row": by inputs; "dropout": none, but its input is a part."""
    ranks: int = 0
    """Number of ranks in a group; 0: all ranks."""
    takes: str = OWN
    """Input of each rank: "own", its samples, or "part", its features of the group's samples."""
    gives: str = OWN
    """Output of each rank: "own" or "part"."""
    dim: int = -1
    """Dimension of the parts that a dropout takes: -1 for features, 1 for channels or heads."""

    def __post_init__(self) -> None:
        if self.how not in HOWS:
            raise UsageError(f"a split is by {' or '.join(HOWS[:2])}, not by {self.how!r}; it reads like {FORM}")
        if self.ranks < 0 or {self.takes, self.gives} - {OWN, PART}:
            raise UsageError(f"{self!r}: ranks is 0 or more, takes and gives are {OWN!r} or {PART!r}")

    def __str__(self) -> str:
        flows = [f"{verb} {PART}" for verb in ("takes", "gives") if getattr(self, verb) == PART]
        dim = [f"dim {self.dim}"] if self.how == DROPOUT else []
        return " ".join([self.how, str(self.ranks), *dim, *flows])


@dataclass(frozen=True)
class ParallelPlan:
    """Splits of layers by name, in the order of the model's modules once it is checked."""

    layers: tuple[tuple[str, Split], ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the groups, ascending, without 1."""
        return tuple(sorted({split.ranks for _, split in self.layers} - {1}))

    @property
    def words(self) -> dict[str, str]:
        """Splits of layers in words, by name, without dropouts and groups of one rank."""
        return {name: str(split) for name, split in self.layers if split.how != DROPOUT and split.ranks > 1}

    def __str__(self) -> str:
        return ", ".join(f"{name}: {split}" for name, split in self.layers)


PlanLike = ParallelPlan | Mapping[str, Any]
"""A plan, or a mapping from layer names to splits, their words, or styles of DTensor's `parallelize_module`."""


def make_plan(content: PlanLike | str, ranks: int = 0) -> ParallelPlan:
    """Return the plan that `content` says; `ranks` is the size of groups that it leaves out (0: all ranks).

    Raises UsageError for words that are no split.
    """
    if isinstance(content, str):
        raise UsageError(f'plan = {content!r} is no plan: name layers, as in {{"fc1": "column 2"}}, or use "{AUTO}"')
    layers = content.layers if isinstance(content, ParallelPlan) else content.items()
    splits = ((name, parse_split(value, name)) for name, value in layers)
    return ParallelPlan(tuple((name, split if split.ranks else replace(split, ranks=ranks)) for name, split in splits))


def parse_split(value: Any, layer: str) -> Split:
    """Return a split from its words, or from DTensor's style. Raises UsageError, naming the layer."""
    if isinstance(value, Split):
        return value
    if any(kind.__module__.startswith(STYLES) and kind.__name__ == "ParallelStyle" for kind in type(value).__mro__):
        return _split_of_style(value, layer)
    words = value.split() if isinstance(value, str) else []
    fields: dict[str, Any] = {"how": words.pop(0) if words else ""}
    if words and words[0].isdigit():
        fields["ranks"] = int(words.pop(0))
    while len(words) >= 2 and words[0] in ("takes", "gives", "dim") and words[0] not in fields:
        key, word = words.pop(0), words.pop(0)
        fields[key] = int(word) if key == "dim" and word.removeprefix("-").isdigit() else word
    if words or fields["how"] not in HOWS or not isinstance(fields.get("dim", -1), int):
        raise UsageError(f"the plan of layer {layer!r} is {value!r}; it reads like {FORM}")
    return Split(**fields)


def _split_of_style(style: Any, layer: str) -> Split:
    """Return the split that a style of DTensor says, of which nothing is imported."""
    name = type(style).__name__
    how = {"ColwiseParallel": COLUMN, "RowwiseParallel": ROW}.get(name)
    if how is None:
        raise UsageError(f"layer {layer!r}: {name} is not supported: use ColwiseParallel or RowwiseParallel")
    takes = _flow(style.input_layouts, layer, f"{name}(input_layouts=...)")
    return Split(how, takes=takes, gives=_flow(style.output_layouts, layer, f"{name}(output_layouts=...)"))


def _flow(layouts: Any, layer: str, where: str) -> str:
    layout = layouts[0] if isinstance(layouts, tuple) and len(layouts) == 1 else layouts
    kind = type(layout).__name__
    if kind == "Replicate" or (kind == "Shard" and layout.dim == 0):
        return OWN
    if kind == "Shard" and layout.dim == -1:
        return PART
    raise UsageError(f"layer {layer!r}: {where} is {layouts}; it has to be Replicate(), Shard(0) or Shard(-1)")
