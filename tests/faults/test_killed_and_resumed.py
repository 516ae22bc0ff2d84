"""A loop that is killed goes on from its last state, on any number of ranks, and has each sample once an epoch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.faults.load_until_killed import BATCH, EVERY, STORAGES
from tests.progress import Run

from unisono.data.kinds import RAW
from unisono.data.order import steps_of
from unisono.data.pack import packing
from unisono.data.pack.packing import PackOptions, pack
from unisono.data.sources import Source

pytestmark = pytest.mark.launches


SAMPLES, EPOCHS = 301, 2


def numbered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a pack whose samples have their number in their first two pixels, in many blocks."""
    monkeypatch.setattr(packing, "BATCH_BYTES", 64)
    for part, count in (("train", SAMPLES), ("test", 20)):
        samples = [bytes([index % 256, index // 256, 0, 255]) for index in range(count)]
        labels, sizes, keys = np.arange(count) * 3 // count, np.full(count, 4), [str(each) for each in range(count)]
        source = Source(RAW, ("a", "b", "c"), keys, labels, sizes, samples.__getitem__, (2, 2))
        pack(source, folder / part, PackOptions(stripes=8), 1, lambda: None)
    return folder


def seen(home: Path, name: str, ranks: int, steps: range) -> list[int]:
    """Return the samples of these steps on all ranks."""
    files = [home / f"{step}.{name}.{rank}" for step in steps for rank in range(ranks)]
    return [sample for file in files for sample in json.loads(file.read_text())]


def test_each_sample_once_an_epoch(mpiexec: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed on 4 ranks in the first epoch, on 2 in the second; each time, steps since the last state are repeated."""
    folder, home = numbered(tmp_path / "pack", monkeypatch), tmp_path / "home"
    home.mkdir()
    script = str(Path(__file__).parent / "load_until_killed.py")
    steps = steps_of(SAMPLES, BATCH)
    last, delivered = EPOCHS * steps, {name: list[int]() for name in STORAGES}
    first = 0
    for ranks, killed in ((4, steps // 2), (2, steps + steps // 3), (4, -1)):
        done = mpiexec(ranks, script, str(folder), str(home), str(last), str(killed))
        assert (done.returncode == 0) == (killed < 0), done.stderr
        stop = last if killed < 0 else json.loads((home / "state.json").read_text())["step"]
        assert killed < 0 or 0 <= killed - stop < EVERY, done.stderr
        for name in STORAGES:
            delivered[name] += seen(home, name, ranks, range(first, stop))
        first = stop
    for numbers in delivered.values():
        assert sorted(numbers[:SAMPLES]) == sorted(numbers[SAMPLES:]) == list(range(SAMPLES))
        assert numbers[:SAMPLES] != numbers[SAMPLES:]
