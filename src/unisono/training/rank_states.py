"""Checkpoints of ranks whose weights or optimizer states differ: every rank's, and the mean of the weights.

same weights everywhere    weights: rank 0's            optimizer: rank 0's
weights that differ        weights: the mean            optimizer: {"ranks": [rank 0's weights and state, ...]}
"""

from __future__ import annotations

from typing import Any

import torch

from unisono.training.checkpoint import Checkpoint
from unisono.training.trainer import Trainer
from unisono.world import World

RANKS = "ranks"


def states_of(trainer: Trainer, world: World) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the weights and the optimizer state for a checkpoint. Called by all ranks together."""
    mine = trainer.model.state_dict(), trainer.optimizer.state_dict()
    if not trainer.reducer.rule.differs:
        return mine
    everyone = world.all_gather_object({"weights": dict(mine[0]), "optimizer": mine[1]})
    weights = [one["weights"] for one in everyone]
    return {name: _mean([one[name] for one in weights]) for name in mine[0]}, {RANKS: everyone}


def take_states(trainer: Trainer, world: World, checkpoint: Checkpoint) -> list[str]:
    """Load a checkpoint into the model and the optimizer. Return lines to report.

    Raises the errors of `load_state_dict` where it does not fit.
    """
    ranks = checkpoint.optimizer.get(RANKS)
    trainer.reducer.resume(checkpoint.step)
    if ranks is None:
        trainer.model.load_state_dict(checkpoint.weights)
        trainer.optimizer.load_state_dict(checkpoint.optimizer)
        return []
    if len(ranks) == world.size and trainer.reducer.rule.differs:
        trainer.model.load_state_dict(ranks[world.rank]["weights"])
        trainer.optimizer.load_state_dict(ranks[world.rank]["optimizer"])
        return []
    trainer.model.load_state_dict(checkpoint.weights)
    return [
        f"the run had {len(ranks)} ranks with weights of their own: all begin with the mean of the weights, and with "
        "no state of the optimizer"
    ]


def _mean(values: list[torch.Tensor]) -> torch.Tensor:
    first = values[0]
    if not (first.is_floating_point() or first.is_complex()):
        return first
    return torch.stack(values).mean(0)
