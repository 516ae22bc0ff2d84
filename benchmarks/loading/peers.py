"""Compares loaders of the same JPEGs, by turns: ours, DataLoader, MosaicML Streaming, WebDataset. Started by run.py.

python peers.py OUTPUT PACK FOLDER      PACK: of FOLDER's images; FOLDER: train/ and test/, a folder for each class
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from peer import LOADERS, Files, no_torchvision

HERE = Path(__file__).parent
ROUNDS, TARS = 5, 8
NEEDS = {"Streaming, OpenCV": "mosaicml-streaming", "WebDataset, OpenCV": "webdataset"}
"""Package of each loader that is not ours or PyTorch's."""


def prepare(data: Path) -> None:
    """Write the images as each library stores them."""
    samples = Files(data / "files", lambda file: file).each  # type: ignore[arg-type,return-value]
    if installed("mosaicml-streaming"):
        no_torchvision()
        from streaming import MDSWriter  # noqa: PLC0415

        with MDSWriter(out=str(data / "mds"), columns={"jpeg": "bytes", "label": "int"}) as writer:
            for file, label in samples:
                writer.write({"jpeg": file.read_bytes(), "label": label})
    if installed("webdataset"):
        import webdataset as wds  # noqa: PLC0415

        (data / "tars").mkdir()
        each = -(-len(samples) // TARS)
        with wds.ShardWriter(str(data / "tars" / "%03d.tar"), maxcount=each, verbose=0) as writer:
            for index, (file, label) in enumerate(samples):
                writer.write({"__key__": f"{index:06}", "jpg": file.read_bytes(), "cls": label})


def installed(package: str) -> str:
    """Return the version of a package, or nothing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def load(name: str, data: Path, cores: int) -> dict[str, float]:
    """Return what one loader found in a process of its own."""
    command = [sys.executable, str(HERE / "peer.py"), name, str(data), str(cores)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("found "))[6:])


def main(output: str, pack: str, folder: str) -> None:
    """Run all loaders by turns on one core and on two, and write medians and spreads."""
    names = [name for name in LOADERS if name not in NEEDS or installed(NEEDS[name])]
    results: dict[str, Any] = {"versions": {NEEDS[name]: installed(NEEDS[name]) for name in NEEDS}, "cores": {}}
    with tempfile.TemporaryDirectory() as room:
        data = Path(room)
        (data / "pack").symlink_to(Path(pack).absolute())
        (data / "files").symlink_to(Path(folder).absolute() / "train")
        prepare(data)
        for cores in (1, 2):
            rounds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
            for _ in range(ROUNDS):
                for name in names:
                    rounds[name].append(load(name, data, cores))
            results["cores"][cores] = {
                name: {key: spread([run[key] for run in each]) for key in each[0]} for name, each in rounds.items()
            }
    Path(output).write_text(json.dumps(results, indent=1) + "\n")


def spread(values: list[float]) -> list[float]:
    """Return the median, the smallest and the largest value."""
    return [statistics.median(values), min(values), max(values)]


if __name__ == "__main__":
    main(*sys.argv[1:])
