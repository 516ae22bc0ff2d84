"""Provenance of the bits of a step beside its recipe: processor, instructions, versions, sources. Ranks compare it.

    rank 0   Xeon (AVX2), PyTorch 2.9, unisono 1.0, sources (3f2a77c0)    weight - rate * gradient is rounded once
    rank 1   Xeon (DEFAULT), PyTorch 2.9, unisono 1.0, sources (3f2a77c0) the product is rounded, then the difference

Both have the same sum of gradients, but other weights after one step of SGD.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from unisono.errors import UsageError
from unisono.processor import HOST, processor
from unisono.step.rule import RankState
from unisono.world import World

SOURCES = {".py", ".c", ".h"}
"""Suffixes of files with code."""


@cache  # it is in each copy of a run's state
def made_on() -> str:
    """Return the processor and its instructions, and the versions of PyTorch and Unisono."""
    kernels = torch.backends.cpu.get_cpu_capability()
    return f"{processor().name} ({kernels}), PyTorch {torch.__version__}, unisono {_version()}"


def _version() -> str:
    try:
        return version("unisono")
    except PackageNotFoundError:  # a folder of sources that was not installed
        return "not installed"


@cache  # of 330 files, 20 ms
def sources() -> str:
    """Return the name of this package's folder with the digits of its content."""
    return code_of(Path(__file__).parents[1])


def code_of(path: Path) -> str:
    """Return the name of a source file, or of a folder of them, with eight digits of the SHA-256 of its content; "" for
    none. What a program hides, such as an editor's copies, is left out."""
    files = sorted(file for file in path.rglob("*") if file.suffix in SOURCES) if path.is_dir() else [path]
    shown = [(file.relative_to(path), file) for file in files if file.is_file()]
    digests = [
        (f"{place}", hashlib.sha256(file.read_bytes()).hexdigest())
        for place, file in shown
        if not any(part.startswith(".") for part in place.parts)
    ]
    return f"{path.name} ({hashlib.sha256(repr(digests).encode()).hexdigest()[:8]})" if digests else ""


def unlike(*made: str) -> list[str]:
    """Return the values without the parts that all have.

    >>> unlike("Xeon (AVX2), PyTorch 2.9", "Xeon (DEFAULT), PyTorch 2.9")
    ['Xeon (AVX2)', 'Xeon (DEFAULT)']
    """
    common = set.intersection(*(set(value.split(", ")) for value in made))
    return [", ".join(part for part in value.split(", ") if part not in common) or "nothing else" for value in made]


def difference(made: Mapping[str, str]) -> str:
    """Return the parts that differ, each with the first who has them; "" where all are the same.

    >>> difference({"rank 0": "Xeon, PyTorch 2.9", "rank 1": "Xeon, PyTorch 2.9", "rank 2": "EPYC, PyTorch 2.9"})
    'rank 0 computes with Xeon, and rank 2 with EPYC'
    """
    owners = dict[str, str]()
    for who, value in made.items():
        owners.setdefault(value, who)
    if len(owners) == 1:
        return ""
    (who, value), *others = zip(owners.values(), unlike(*owners), strict=True)
    return ", and ".join((f"{who} computes with {value}", *(f"{other} with {value}" for other, value in others)))


class MadeOnRanks:
    """Difference between what the ranks of a world compute with, gathered once."""

    def __init__(self, world: World) -> None:
        """Gather it. Collective."""
        self.own = f"{made_on()}, {sources()}"
        self.difference = difference_of_ranks(world.all_gather_object(self.own))
        self.warns = world.rank == 0
        """True on rank 0 until it has warned."""

    def close(self) -> None:
        """Hold nothing."""


def difference_of_ranks(made: Sequence[str]) -> str:
    return difference({f"rank {rank}": own for rank, own in enumerate(made)})


def check_alike(world: World, promise: str) -> None:
    """Raise UsageError on all ranks where they compute with different things, and the option `promise`, "virtual_ranks
    = 4", promises the same bits. The first comparison of a world is collective."""
    if world.size > 1:
        refuse(promise, world.resource(MadeOnRanks).difference)


def refuse(promise: str, difference: str) -> None:
    """Raise UsageError for an option that promises the same bits, if there is a difference."""
    if difference:
        raise UsageError(
            f"{promise} promises the same bits, but {difference}; use one kind of processor and the same versions and "
            "files on all hosts, or train without virtual ranks"
        )


def warn_of_difference(world: World, device: torch.device, state: RankState) -> None:
    """Let rank 0 warn, once for a world, where ranks compute on processors, and with different things. `state` is that
    of ranks between two steps. The first comparison of a world is collective."""
    if world.size == 1 or not (ranks := world.resource(MadeOnRanks)).difference:
        return
    if ranks.warns and device.type == HOST:
        effect = "so their weights may drift apart by rounding: use one kind of host and version, or unisono.Sharded"
        if state in (RankState.SHARDED, RankState.OWN):
            effect = "so bits depend on who computes: use one kind of host and version where they matter"
        logging.getLogger("unisono").warning(f"{ranks.difference}, {effect}")
        ranks.warns = False
