"""Ranks that load a pack in every storage by turns, and keep the loaders' states; rank 1 may kill itself in the midst.

python load_until_killed.py PACK FOLDER LAST KILLED

All go on from FOLDER/state.json, which rank 0 writes at every third step; rank R writes the samples of each step into
FOLDER/STEP.STORAGE.R. LAST: steps of all legs together. KILLED: step in which rank 1 ends itself, or -1.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import unisono
from unisono.data import Loader
from unisono.data.pack.index import read_index

BATCH, EVERY = 16, 3

STORAGES: dict[str, dict[str, Any]] = {
    "partitioned": {},
    "groups": {"groups": 2},
    "parts": {"shuffle": "every:2,parts:2"},
    "replicated": {"storage": "replicated"},
    "streamed": {"storage": "streamed", "buffer_megabytes": 1},
    "cached": {"storage": "streamed", "buffer_megabytes": 1, "cache_megabytes": 1},
}


def main(pack: str, folder: str, last: int, killed: int) -> None:
    """Load up to step `last`, or to the end of rank 1."""
    world, home, about = unisono.init(), Path(folder), read_index(Path(pack) / "train").about
    state = home / "state.json"
    saved = json.loads(state.read_text()) if state.exists() else {"step": 0, "loaders": {}}
    loaders = {name: Loader(pack, world, BATCH, seed=5, **options) for name, options in STORAGES.items()}
    for name, loader in loaders.items():
        if name in saved["loaders"]:
            loader.load_state_dict(saved["loaders"][name])
    batches = {name: iter(loader) for name, loader in loaders.items()}
    for step in range(saved["step"], last):
        for name, loader in loaders.items():
            batch = next(batches[name], None)
            if batch is None:  # the next epoch
                batches[name] = iter(loader)
                batch = next(batches[name])
            pixels = (batch[0][:, 0, 0, :2].double() * about.std[0] + about.mean[0]) * 255
            numbers = [round(low) + 256 * round(high) for low, high in pixels.tolist()]
            (home / f"{step}.{name}.{world.rank}").write_text(json.dumps(numbers))
        if step == killed and world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        world.barrier()
        if (step + 1) % EVERY == 0:
            if world.rank == 0:
                states = {name: loader.state_dict() for name, loader in loaders.items()}
                (home / "new").write_text(json.dumps({"step": step + 1, "loaders": states}))
                (home / "new").replace(state)
            world.barrier()  # rank 1 does not end itself before the state is there
    for loader in loaders.values():
        loader.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
