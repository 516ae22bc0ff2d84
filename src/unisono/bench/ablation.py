"""Runs of a recipe that differ in what is switched on: what each optimization brings (DIMD's table 1, figures 10, 11).

    all off        library, no overlap, files (or stripes) read at each use, PyTorch's convolutions    12.0 s an epoch
    schedule       the recipe's algorithm, or "auto"                                                   10.0     +20%
    overlap        ... and its overlap, or "auto"                                                       8.0     +25%
    wire           ... and its wire, or bfloat16                                                        7.2     +11%
    memory         ... and its storage, or "auto"                                                       6.8      +6%
    convolutions   ... and the fastest algorithm of each                                                6.0     +13%

Each run is one of `unisono train`; a run that has ended is not repeated. The epochs after the first count.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from unisono.data.options import DataOptions
from unisono.data.pack.packing import PackOptions, pack
from unisono.data.sources import find
from unisono.data.storage import AUTO, FILES, PARTITIONED, STREAMED
from unisono.formats import markdown_table
from unisono.papers.figures import MeasuredRow
from unisono.papers.measure import FigureRun, carry_out
from unisono.training.recipe import OWN, Recipe

Switches = Mapping[str, str]
"""Values of keys of a recipe."""


class Variant(NamedTuple):
    """Run of a recipe: what is switched on in it, and what was measured."""

    label: str
    epoch: MeasuredRow
    accuracy: float | None
    """Share of the test set, in percent; None for texts."""


def ladder(recipe: Recipe) -> dict[str, Switches]:
    """Return the switches of the runs of an ablation by label; each has what was switched on before, and one more."""
    exchange, rule, data = recipe.exchange, recipe.rule, recipe.data
    steps: list[tuple[str, str, str, str]] = [  # what it is, its key, off and on
        ("schedule", "exchange.algorithm", "library", _unless(exchange.algorithm, "library", AUTO)),
        ("overlap", "rule.overlap", "none", _unless(rule.overlap, "none", AUTO)),
        ("wire", "exchange.wire", OWN, _unless(exchange.wire, OWN, "bfloat16")),
        ("convolutions", "compute.convolutions", "library", "autotune"),
    ]
    if data.pack:
        off = FILES if data.files else STREAMED
        in_memory = data.storage if data.storage not in (FILES, STREAMED) else AUTO
        steps.insert(3, ("memory", "data.storage", off, in_memory))
    now = {key: off for _, key, off, _ in steps}
    runs: dict[str, Switches] = {"all off": dict(now)}
    for label, key, _, on in steps:
        now[key] = on
        runs[label] = dict(now)
    return runs


def _unless(value: str, off: str, on: str) -> str:
    return on if value == off else value


def run_variants(
    train: Sequence[str], variants: Mapping[str, Switches], folder: Path, log: Callable[[str], None]
) -> list[Variant]:
    """Make a run for each of these switches, into a folder, and return what was measured. `train` is the command.

    Raises UsageError with the last line of a run that fails.
    """
    measured = []
    for label, switches in variants.items():
        arguments = [*train, *(argument for key, value in switches.items() for argument in ("--set", f"{key}={value}"))]
        command = shlex.join(arguments).replace("{", "{{").replace("}", "}}")
        rows = {row.name: row for row in carry_out(FigureRun(label, f"{command} --run {{out}}"), folder)}
        accuracy = rows.get("test accuracy")
        measured.append(Variant(label, rows["an epoch"], None if accuracy is None else accuracy.value))
        log(f"{label}: {measured[-1].epoch.value:.3g} s an epoch")
    return measured


def as_data(variants: Iterable[Variant]) -> str:
    """Return the measured rows as JSON."""
    rows = list[dict[str, Any]]()
    for label, epoch, accuracy in variants:
        samples = [epoch.low, epoch.value, epoch.high]
        rows.append({"name": f"{label}: an epoch", "unit": "s", "samples": samples})
        if accuracy is not None:
            rows.append({"name": f"{label}: test accuracy", "unit": "%", "samples": [accuracy]})
    return json.dumps(rows, indent=1)


def table(variants: Sequence[Variant]) -> str:
    """Return seconds an epoch, accuracy, and how much faster each run is than the one before and than the first."""
    lines, before = list[list[str]](), variants[0].epoch.value
    for label, epoch, accuracy in variants:
        gained = f"{before / epoch.value - 1:+.0%}" if lines else ""
        speedup = f"{variants[0].epoch.value / epoch.value:.2f}"
        shown = "" if accuracy is None else f"{accuracy:.1f}%"
        lines.append([label, f"{epoch.value:.3g}", f"{epoch.low:.3g} to {epoch.high:.3g}", shown, gained, speedup])
        before = epoch.value
    heads = ["", "s an epoch", "range", "accuracy", "gained", "x the first"]
    return "\n".join(markdown_table(heads, lines, left=[0]))


def write_images(folder: Path, images: int, side: int) -> DataOptions:
    """Write JPEG files of so many training images, a quarter as many test images, and a pack of both; return where.

    An image has `side` pixels and is brighter at its top or at its bottom, which is its class. What is there stays.
    """
    import cv2  # noqa: PLC0415  of the extra `data`

    folder = folder / f"{images}_images_of_{side}"
    ramp = np.linspace(0, 160, side, dtype=np.float32)
    for split, count in (("train", images), ("test", max(1, images // 4))):
        for index in range(count):
            label = index % 2
            path = folder / "files" / split / str(label) / f"{index}.jpg"
            if path.exists():
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            noise = np.random.default_rng(index).integers(0, 96, (side, side, 3))
            cv2.imwrite(
                str(path), (noise + np.rot90(np.tile(ramp, (side, 1)), 1 + 2 * label)[..., None]).astype(np.uint8)
            )
    for split, source in find(folder / "files").items():
        pack(source, folder / "pack" / split, PackOptions(), 2, lambda: None)
    return DataOptions(pack=str((folder / "pack").resolve()), files=str((folder / "files").resolve()))


def storages(data: DataOptions) -> dict[str, Switches]:
    """Return the switches of runs on the same samples: in memory, and read at each use."""
    by_label = {"from memory": PARTITIONED, "from stripes": STREAMED, "from files": FILES}
    return {
        label: {"data.pack": data.pack, "data.files": data.files, "data.storage": storage}
        for label, storage in by_label.items()
    }
