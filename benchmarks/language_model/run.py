"""Runs the benchmark of a language model: Python's asyncio, byte by byte, with gpt_small on 1 and 2 ranks.

python benchmarks/language_model/run.py         about 5 minutes on 2 cores
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from unisono.data.pack.options import PackOptions
from unisono.data.pack.packing import pack
from unisono.data.sources import find
from unisono.data.text.options import TextOptions
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
    found = [json.loads((HERE / f"ranks_{ranks}.json").read_text()) for ranks in RANKS]
    lines = [
        "# gpt_small on text",
        "",
        "Loss of unisono.Trainer beside a plain PyTorch loop on one rank, in float64:",
        "",
    ]
    lines += ["| ranks | steps | first loss | last loss | largest relative difference |", "| ---: |" + " ---: |" * 4]
    for one in found:
        loss = one["loss"]
        apart, own = loss["largest relative difference"], loss["unisono"]
        lines.append(f"| {one['ranks']} | {loss['steps']} | {own[0]:.4f} | {own[-1]:.4f} | {apart:.1e} |")
    names = list(found[0]["speed"]["median tokens/s"])
    lines += ["", "Tokens/s in float32, medians of rounds in which the contenders take turns:", ""]
    lines += ["| ranks | " + " | ".join(names) + " | unisono / DDP |", "| ---: |" + " ---: |" * (len(names) + 1)]
    for one in found:
        rates = one["speed"]["median tokens/s"]
        ratio = rates["unisono.Trainer"] / rates["DDP on gloo"]
        lines.append(f"| {one['ranks']} | " + " | ".join(f"{rates[name]:,.0f}" for name in names) + f" | {ratio:.2f} |")
    lines += ["", f"PyTorch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores.", ""]
    return "\n".join(lines)


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
