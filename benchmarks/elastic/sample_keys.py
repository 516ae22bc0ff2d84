"""Record of the samples that each rank of an elastic run trains on, and its comparison with the order of the seed.

    generation 1   step 0 1 2 3 4 5       steps 3 to 5 are lost: generation 2 begins with step 3
    generation 2              3 4 5 6
    counted             0 1 2 3 4 5 6     of each step the last generation

`network` is the small network, whose hook appends the numbers of a share's samples to a file of the rank's own before
it computes them. It knows a sample by its pixels, which no two have in common, and step and share by the random seed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from unisono.data.builtin import load_digits
from unisono.data.order import permutation, steps_of
from unisono.elastic.standby import FOLDER_VARIABLE, GENERATION_VARIABLE
from unisono.models import make_network
from unisono.reducer.virtual_ranks import seed_of_share
from unisono.training.trainer import seed_of_step

Numbers = NDArray[np.int64]

Counted = dict[int, dict[int, Numbers]]
"""Samples of each share of each step."""


def keys_of(home: Path) -> Path:
    """Return the folder of the files of a run."""
    return home.with_name(f"{home.name}.keys")


def network(classes: int, channels: int) -> torch.nn.Module:
    """Return the small network, whose shares are recorded."""
    model = make_network("small_convnet", "", classes, channels)
    number_of = {row.tobytes(): number for number, row in enumerate(load_digits().train.inputs.numpy())}
    folder = keys_of(Path(os.environ[FOLDER_VARIABLE]))
    folder.mkdir(exist_ok=True)
    file = (folder / f"{os.environ[GENERATION_VARIABLE]}-{os.uname().nodename}-{os.getpid()}").open("ab", buffering=0)

    def record(module: torch.nn.Module, given: tuple[torch.Tensor]) -> None:
        if module.training:
            numbers = [number_of.get(_pixels(row), -1) for row in given[0]]
            line = torch.initial_seed() % (1 << 63), len(numbers), *numbers  # seeds of shares are smaller
            file.write(np.array(line, np.int64).tobytes())  # at once, as the rank may be killed

    model.register_forward_pre_hook(record)
    return model


def _pixels(row: torch.Tensor) -> bytes:
    return row.detach().contiguous().numpy().tobytes()


def records(path: Path) -> Iterator[tuple[int, Numbers]]:
    """Yield the seed and the samples of each share in a file; one that was cut off by a kill is left out."""
    content, at = np.frombuffer(path.read_bytes()[: path.stat().st_size // 8 * 8], np.int64), 0
    while at + 2 <= len(content) and (end := at + 2 + int(content[at + 1])) <= len(content):
        yield int(content[at]), content[at + 2 : end]
        at = end


def counted(folder: Path, seed: int, steps: int, shares: int) -> Counted:
    """Return the samples of each step by the last generation that has made it. Raises ValueError for a share that a
    generation has made twice in a step."""
    place = {
        seed_of_share(seed_of_step(seed, step, 0), share): (step, share)
        for step in range(steps)
        for share in range(shares)
    }
    generations: dict[int, Counted] = {}
    for path in sorted(folder.iterdir()):
        made = generations.setdefault(int(path.name.partition("-")[0]), {})
        for drawn, numbers in records(path):
            if drawn not in place:  # tried before the first step
                continue
            step, share = place[drawn]
            if share in made.setdefault(step, {}):
                raise ValueError(f"{path}: step {step}, share {share} was made twice in a generation")
            made[step][share] = numbers
    last: Counted = {}
    for _, made in sorted(generations.items()):
        begin = min(made, default=steps)
        last = {step: of for step, of in last.items() if step < begin} | made
    return last


def check(folder: Path, seed: int, epochs: int, batch: int, shares: int) -> str:
    """Return in words that each sample counted once an epoch, in the order of the seed. Raises ValueError naming step
    and share where one did not."""
    samples = len(load_digits().train)
    each = steps_of(samples, batch)
    last = counted(folder, seed, epochs * each, shares)
    for epoch in range(epochs):
        order = permutation(samples, seed, epoch)
        for done in range(each):
            step, whole = epoch * each + done, order[done * batch :][:batch]
            for share in range(shares):
                part = whole[len(whole) * share // shares : len(whole) * (share + 1) // shares]
                made = last.get(step, {}).get(share, part[:0])
                if not np.array_equal(part, made):
                    wrong, right = (f"{len(numbers)} samples {numbers[:4]}..." for numbers in (made, part))
                    raise ValueError(f"step {step}, share {share}: {wrong} instead of {right}")
    return f"{epochs * each} steps, each once"
