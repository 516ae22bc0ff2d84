"""Plan of layers that are split over ranks: a small value, written by hand, as words, or as DTensor's styles.

    {"fc1": "column 2 gives part", "fc2": "row 2 takes part"}              a layer name: how, group size, what flows

"column" splits the outputs of a layer (features of Linear, channels of Conv), "row" its inputs (features of Linear,
rows of Embedding), as in Megatron-LM and DTensor, "heads" a MultiheadAttention. "dropout" names a Dropout that works on
parts. Names may have wildcards: `layers.*.fc1`. `docs/how_to/split_layers.md` has the words, and DTensor's styles.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from unisono.errors import UsageError

COLUMN, ROW, HEADS, DROPOUT = "column", "row", "heads", "dropout"
OWN, PART = "own", "part"

AUTO = "auto"
"""Plan that is chosen by prediction (`tensor_parallel/choose_plan.py`)."""

WORDS = re.compile(r"(column|row|heads|dropout)(?: (\d+))?(?: dim (-?\d))?(?: takes (own|part))?(?: gives (own|part))?")
FORM = '"column 2 gives part": column, row or heads, the size of the group, "takes part" and "gives part"'

STYLES = {"ColwiseParallel": COLUMN, "RowwiseParallel": ROW}
LAYOUTS = {"(Replicate(),)": OWN, "(Shard(dim=0),)": OWN, "(Shard(dim=-1),)": PART}
"""Flows of a plan, by the words of DTensor's layouts."""


@dataclass(frozen=True)
class Split:
    """Split of one layer over the ranks of its model groups."""

    how: str
    """"column": by outputs; "row": by inputs; "heads": by an attention's; "dropout": none, but its input is a part."""
    ranks: int = 0
    """Number of ranks in a group; 0: all ranks."""
    takes: str = OWN
    """Input of each rank: "own", its samples, or "part", its features of the group's samples."""
    gives: str = OWN
    """Output of each rank: "own" or "part"."""
    dim: int = -1
    """Dimension of the parts that a dropout takes: -1 for features, 1 for channels or heads."""

    def __post_init__(self) -> None:
        if not WORDS.fullmatch(str(self)):
            raise UsageError(f"{self!r} is no split; it reads like {FORM}")

    def __str__(self) -> str:
        dim = f" dim {self.dim}" if self.how == DROPOUT else ""
        flows = (f" {verb} {flow}" for verb, flow in (("takes", self.takes), ("gives", self.gives)) if flow != OWN)
        return f"{self.how} {self.ranks}{dim}{''.join(flows)}"


class ParallelPlan(dict[str, Split]):
    """Splits of layers by name, in the order of the model's modules once it is checked."""

    @property
    def splits(self) -> ParallelPlan:
        """Splits of layers with weights."""
        return ParallelPlan((name, split) for name, split in self.items() if split.how != DROPOUT)

    def __str__(self) -> str:
        return ", ".join(f"{name}: {split}" for name, split in self.items())


PlanLike = Mapping[str, Any]
"""A plan, or a mapping from layer names to splits, their words, or styles of DTensor's `parallelize_module`."""


def make_plan(content: PlanLike | str, ranks: int = 0) -> ParallelPlan:
    """Return the plan that `content` says, in groups of `ranks` (0: all) by default. UsageError for other words."""
    if isinstance(content, str):
        raise UsageError(f'plan = {content!r} is no plan: name layers, as in {{"fc1": "column 2"}}, or use "{AUTO}"')
    splits = ((name, parse_split(value, name)) for name, value in content.items())
    return ParallelPlan((name, split if split.ranks else replace(split, ranks=ranks)) for name, split in splits)


def parse_split(value: Any, layer: str) -> Split:
    """Return a split from its words, or from DTensor's style. Raises UsageError, naming the layer."""
    if isinstance(value, Split):
        return value
    if "ParallelStyle" in (kind.__name__ for kind in type(value).__mro__):
        return _split_of_style(value, layer)
    match = WORDS.fullmatch(" ".join(value.split())) if isinstance(value, str) else None
    if match is None:
        raise UsageError(f"the plan of layer {layer!r} is {value!r}; it reads like {FORM}")
    how, ranks, dim, takes, gives = match.groups()
    return Split(how, int(ranks or 0), takes or OWN, gives or OWN, int(dim or -1))


def _split_of_style(style: Any, layer: str) -> Split:
    """Return the split that a style of DTensor says, of which nothing is imported."""
    name, sides = type(style).__name__, [repr(getattr(style, f"{side}_layouts", "")) for side in ("input", "output")]
    if name not in STYLES or not set(sides) <= set(LAYOUTS):
        raise UsageError(
            f"layer {layer!r}: {name} with layouts {' and '.join(sides)} is not supported: use ColwiseParallel or "
            "RowwiseParallel with Replicate(), Shard(0) or Shard(-1)"
        )
    return Split(STYLES[name], takes=LAYOUTS[sides[0]], gives=LAYOUTS[sides[1]])
