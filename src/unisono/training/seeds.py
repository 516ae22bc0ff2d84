"""Seeds of random numbers (dropout), so that checkpoints need not keep their state."""

from __future__ import annotations

import numpy as np


def seed_of_step(seed: int, step: int, rank: int) -> int:
    """Return the seed of the random numbers of a rank's step."""
    return int(np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)[0] >> 1)
