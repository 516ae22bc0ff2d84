"""Runs the benchmark of the data: decoding, shuffle, and training from memory beside files.

python benchmarks/loading/run.py DATA [PART ...]      DATA: the folder with clothing/ and cifar10-images/, unpacked
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from unisono.data.kinds import RAW
from unisono.data.pack.packing import PackOptions, pack
from unisono.data.sources import Source, find
from unisono.launch import find_mpiexec

HERE = Path(__file__).parent
TABLE = HERE.parent / "collectives" / "switch" / "table.toml"
HOSTS, RATE = 8, 100_000_000
SMALL, COUNT = 100, 1_000_000


def on_ranks(ranks: int, script: str, *arguments: str | Path) -> None:
    """Run a script of this folder on ranks of this machine."""
    command = [str(find_mpiexec()), "-n", str(ranks), sys.executable, str(HERE / script), *map(str, arguments)]
    subprocess.run(command, check=True)


def packed(source: Path, folder: Path, side: int = 0) -> Path:
    """The pack of a data set with its parts."""
    for name, part in find(source).items():
        pack(part, folder / name, PackOptions(short_side=side), 2, lambda: None)
    return folder


def numbers(count: int, length: int, folder: Path) -> Path:
    """A pack of so many samples of random bytes."""
    data = np.random.default_rng(0).integers(0, 256, (count, length), np.uint8)
    keys = [str(index) for index in range(count)]
    labels = np.arange(count) * 10 // count
    sizes = np.full(count, length)
    classes = tuple("0123456789")
    source = Source(RAW, classes, keys, labels, sizes, lambda index: data[index].tobytes(), (length, 1))
    pack(source, folder, PackOptions(), 2, lambda: None)
    return folder


def joined(first: Source, second: Source) -> Source:
    """Two parts of a data set as one."""
    keys, labels, sizes = ([*getattr(first, name), *getattr(second, name)] for name in ("keys", "labels", "sizes"))

    def read(index: int) -> bytes:
        return first.read(index) if index < len(first) else second.read(index - len(first))

    return Source(first.kind, first.classes, keys, np.array(labels), np.array(sizes), read, first.shape)


def decoding(data: Path, room: Path) -> None:
    """Images/s of a core."""
    folder = packed(data / "clothing", room / "clothing")
    command = [
        sys.executable,
        HERE / "decoding.py",
        HERE / "decoding.json",
        folder / "train",
        data / "clothing" / "train",
    ]
    subprocess.run([*map(str, command), "224"], check=True)


def peers(data: Path, room: Path) -> None:
    """Images/s, time to the first batch and memory beside other libraries."""
    folder = room / "clothing"
    if not folder.exists():
        packed(data / "clothing", folder)
    command = [sys.executable, HERE / "peers.py", HERE / "peers.json", folder, data / "clothing"]
    subprocess.run([*map(str, command)], check=True)


def shuffling(data: Path, room: Path) -> None:
    """The shuffle on one node."""
    parts = list(find(data / "cifar10-images").values())
    pack(joined(*parts), room / "all", PackOptions(), 2, lambda: None)
    on_ranks(4, "shuffling.py", HERE / "shuffle_cifar.json", room / "all", 4 << 20)
    on_ranks(4, "shuffling.py", HERE / "shuffle_small.json", numbers(COUNT, SMALL, room / "small"), 4 << 20)


def between_hosts(_: Path, room: Path) -> None:
    """The shuffle in the lab."""
    folder = numbers(80_000, 1_000, room / "lab")
    options = ["--supernodes=1", f"--hosts={HOSTS}", f"--rate={RATE // 1_000_000}mbit"]
    script = [sys.executable, HERE / "shuffling.py", HERE / "shuffle_lab.json", folder, 64 << 20, RATE]
    command = [sys.executable, "-m", "unisono", "lab", *options, "--", *map(str, script)]
    subprocess.run(command, env={**os.environ, "UNISONO_TABLE": str(TABLE), "OMP_NUM_THREADS": "1"}, check=True)


def epochs(data: Path, room: Path) -> None:
    """Training from memory beside files."""
    folder = room / "cifar"
    if not folder.exists():
        packed(data / "cifar10-images", folder)
    on_ranks(2, "epochs.py", HERE / "epochs.json", folder, data / "cifar10-images" / "train")


PARTS: dict[str, Callable[[Path, Path], None]] = {
    "decoding": decoding,
    "peers": peers,
    "shuffling": shuffling,
    "between_hosts": between_hosts,
    "epochs": epochs,
}


def summary() -> str:
    """All results as Markdown."""
    lines = ["# Data: decoding, shuffle, training from memory", ""]
    if (path := HERE / "decoding.json").exists():
        result = json.loads(path.read_text())
        speed = result["images_per_second"]
        lines += [
            f"## {result['images']} photographs, parts of any scale to {result['size']} x {result['size']}, one core",
            "",
        ]
        lines += ["| | images/s | spread | ours is |", "| --- | ---: | ---: | ---: |"]
        for name, each in speed.items():
            low, high = result["spread"][name]
            lines.append(f"| {name} | {each:,.0f} | {low:,.0f} to {high:,.0f} | {speed['ours'] / each:.2f} |")
        lines.append("")
    if (path := HERE / "peers.json").exists():
        lines += peer_rows(json.loads(path.read_text()))
    rows = [path for name in ("cifar", "small", "lab") if (path := HERE / f"shuffle_{name}.json").exists()]
    if rows:
        lines += ["## The shuffle", ""]
        heads = ["samples", "ranks", "MB", "shuffle", "MPI_Alltoallv", "of Alltoallv", "of the link"]
        heads += ["memory above the share", "epoch"]
        lines += ["| " + " | ".join(heads) + " |", "| --- |" + " ---: |" * (len(heads) - 1)]
    for path in rows:
        result = json.loads(path.read_text())
        ours, peer, link = result["shuffle_s"], result["alltoallv_s"], result["link_s"]
        share = result["peak_above_partition_bytes"] / result["partition_bytes"]
        cells = [f"{result['samples']:,}", result["ranks"], f"{result['bytes'] / 1e6:.0f}"]
        cells += [f"{ours * 1e3:.1f} ms", f"{peer * 1e3:.1f} ms", f"{peer / ours:.0%}"]
        cells += [f"{link / ours:.0%}" if link else "", f"{share:.0%}, a segment is {1 / result['segments']:.0%}"]
        cells.append(f"{result['epoch_s'] * 1e3:.1f} ms")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    if (path := HERE / "epochs.json").exists():
        result = json.loads(path.read_text())
        lines += [
            "",
            f"## CIFAR-10, ResNet-20, {result['ranks']} ranks",
            "",
            "| | seconds of an epoch | waits for data |",
        ]
        lines += ["| --- | ---: | ---: |"]
        for name, each in result["epoch_s"].items():
            lines.append(f"| {name} | {each:.1f} | {result['waited_for_data'][name]:.1%} |")
    cores = f"{os.cpu_count()} cores ({platform.processor() or platform.machine()})"
    return "\n".join([*lines, "", f"Python {platform.python_version()}, {cores}.", ""])


def peer_rows(results: dict[str, Any]) -> list[str]:
    """Loaders of the same JPEGs as Markdown."""
    lines = [
        "## Beside other libraries: the same photographs, to batches of 32 x 3 x 224 x 224, new processes by turns",
        "",
    ]
    for cores, loaders in results["cores"].items():
        heads = [f"{cores} core{'s' * (int(cores) > 1)}", "images/s", "spread", "unisono is", "first batch", "memory"]
        lines += ["| " + " | ".join(heads) + " |", "| --- |" + " ---: |" * (len(heads) - 1)]
        ours = loaders["unisono"]["images_per_second"][0]
        for name, each in loaders.items():
            median, low, high = each["images_per_second"]
            cells = [name, f"{median:,.0f}", f"{low:,.0f} to {high:,.0f}", f"{ours / median:.2f}"]
            cells += [f"{each['first_batch_s'][0] * 1e3:.0f} ms", f"{each['bytes'][0] / 1e6:.0f} MB"]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    versions = [f"{package} {version or 'is not installed'}" for package, version in results["versions"].items()]
    return [*lines, f"{', '.join(versions)}.", ""]


def main(data: str, *parts: str) -> None:
    """Run the parts that are named, all by default, and write the summary."""
    with tempfile.TemporaryDirectory() as room:
        for part in parts or PARTS:
            if part not in PARTS:
                sys.exit(f"no part {part!r}; there are {', '.join(PARTS)}")
            PARTS[part](Path(data), Path(room))
    (HERE / "summary.md").write_text(summary())
    print(summary())


if __name__ == "__main__":
    main(*sys.argv[1:])
