"""Runs the benchmark of streamed storage on 2 ranks of this machine, and writes results.json.

python benchmarks/streaming/run.py [FOLDER]      FOLDER: for a pack of 512 MB; by default a temporary one
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from unisono.data.kinds import RAW
from unisono.data.pack.packing import PackOptions, pack
from unisono.data.sources import Source
from unisono.launch import find_mpiexec

HERE = Path(__file__).parent
RANKS, SAMPLES, SIDE = 2, 40_000, 113


def noise(folder: Path) -> Path:
    """A pack of grey images of random bytes, 12.8 kB each, with a test set of 100."""
    for part, count in (("train", SAMPLES), ("test", 100)):
        labels, sizes = np.arange(count) * 10 // count, np.full(count, SIDE * SIDE)
        keys = [str(index) for index in range(count)]

        def read(index: int) -> bytes:
            return np.random.default_rng(index).bytes(SIDE * SIDE)

        source = Source(RAW, tuple("0123456789"), keys, labels, sizes, read, (SIDE, SIDE))
        pack(source, folder / part, PackOptions(), 2, lambda: None)
    return folder


def main(room: str) -> None:
    """Make the pack and load it on the ranks."""
    folder = Path(room) / "noise"
    if not folder.exists():
        noise(folder)
    script = [sys.executable, HERE / "loading.py", HERE / "results.json", folder]
    subprocess.run([str(find_mpiexec()), "-n", str(RANKS), *map(str, script)], check=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(temporary)
