"""Runs the benchmark of a language model: Python's asyncio, byte by byte, with gpt_small on 1 and 2 ranks.

python benchmarks/language_model/run.py         about 5 minutes on 2 cores
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from unisono.data.kinds.text import TextOptions
from unisono.data.pack.packing import PackOptions, pack
from unisono.data.sources import find
from unisono.launch import find_mpiexec

HERE = Path(__file__).parent
WINDOW = 64
RANKS = (1, 2)


def pack_text(folder: Path) -> Path:
    """Return a pack of the sources of asyncio."""
    for name, source in find(Path(asyncio.__file__).parent, TextOptions(WINDOW)).items():
        pack(source, folder / name, PackOptions(), 1, lambda: None)
    return folder


def summary() -> str:
    """Return the results as tables in Markdown."""
    results = [json.loads((HERE / f"ranks_{ranks}.json").read_text()) for ranks in RANKS]
    lines = [
        "# gpt_small on text",
        "",
        "Loss of unisono.Trainer beside a plain PyTorch loop on one rank, in float64:",
        "",
    ]
    lines += ["| ranks | steps | first loss | last loss | largest relative difference |", "| ---: |" + " ---: |" * 4]
    for result in results:
        loss = result["loss"]
        apart, losses = loss["largest relative difference"], loss["unisono"]
        lines.append(f"| {result['ranks']} | {loss['steps']} | {losses[0]:.4f} | {losses[-1]:.4f} | {apart:.1e} |")
    lines += [
        "",
        "Steps in float32: median (quartiles) over rounds in which the contenders take turns, of tokens/s, of each",
        "round's tokens/s divided by DDP's of the same round, and of the processor time of a rank:",
        "",
        "| ranks | contender | tokens/s | beside DDP | processor ms a step |",
        "| ---: | --- | ---: | ---: | ---: |",
    ]
    for result in results:
        lines += speed_rows(result["ranks"], result["speed"])
    lines += [""]
    lines += [
        f"With ranks = {result['ranks']}, each contender had made {result['speed']['steps before']} steps before; "
        f"the Trainer's overlap was then {result['speed']['setting']['overlap']}, in buckets of at most "
        f"{result['speed']['setting']['bucket_bytes'] / 2**20:g} MiB."
        for result in results
    ]
    lines += ["", f"PyTorch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores.", ""]
    return "\n".join(lines)


def speed_rows(ranks: int, speed: dict[str, Any]) -> list[str]:
    """Return a row for each contender on so many ranks."""
    rows, peer = [], speed["rounds"]["DDP on gloo"]
    for name, rounds in speed["rounds"].items():
        rates = spread([speed["tokens of a step"] / ours["wall"] for ours in rounds], ",.0f")
        ratios = spread([theirs["wall"] / ours["wall"] for ours, theirs in zip(rounds, peer, strict=True)], ".2f")
        processor = spread([1e3 * ours["processor"] for ours in rounds], ".1f")
        rows.append(f"| {ranks} | {name} | {rates} | {ratios} | {processor} |")
    return rows


def spread(values: list[float], form: str) -> str:
    """Return the median and the quartiles in words.

    >>> spread([4.0, 1.0, 2.0, 3.0, 5.0], ".1f")
    '3.0 (2.0 to 4.0)'
    """
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


def main() -> None:
    """Pack, train on each number of ranks, and write the summary."""
    with tempfile.TemporaryDirectory() as folder:
        packs = pack_text(Path(folder) / "packs")
        for ranks in RANKS:
            command = [sys.executable, str(HERE / "ranks.py"), str(packs), str(HERE / f"ranks_{ranks}.json")]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            subprocess.run([str(find_mpiexec()), "-n", str(ranks), *command], env=environment, check=True)
    (HERE / "summary.md").write_text(summary())
    print(summary())


if __name__ == "__main__":
    main()
