"""Checkpoints of ranks whose weights or optimizer states differ: every rank's, and the weights that they share.

same weights everywhere    weights: rank 0's            optimizer: rank 0's; with shards, those of all ranks joined
layers that are split      weights: whole, gathered     optimizer: whole, gathered
weights that differ        weights: mean or anchor      optimizer: {"ranks": [rank 0's weights and states, ...]}

A rank's states are those of its optimizer and of the rule: anchor, outer momentum, residuals, changes in flight.
"""

from __future__ import annotations

from typing import Any

import torch

from unisono.step.replica import ANCHOR
from unisono.step.rule import RankState
from unisono.tensor_parallel.model import split_of
from unisono.tensor_parallel.whole_state import cut_optimizer_state, whole_optimizer_state, whole_state_dict
from unisono.training.checkpoint import Checkpoint
from unisono.training.trainer import Trainer
from unisono.world import World

RANKS = "ranks"


def states_of(trainer: Trainer, world: World) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the weights and the optimizer state for a checkpoint. Called by all ranks together."""
    sharded = trainer.reducer.sharded
    if split_of(trainer.model) is not None:
        return whole_state_dict(trainer.model), whole_optimizer_state(trainer.model, trainer.optimizer)
    if sharded is not None:  # rank 0 alone needs memory for the whole state
        return trainer.model.state_dict(), sharded.state_dict(root=0)
    mine = trainer.model.state_dict(), trainer.optimizer.state_dict()
    if not trainer.reducer.traits.state.differs:
        return mine
    rule_state = trainer.reducer.rule_state()
    everyone = world.all_gather_object({"weights": dict(mine[0]), "optimizer": mine[1], "rule": rule_state})
    if trainer.reducer.traits.state is RankState.ANCHORED:
        with trainer.reducer.weights.averaged():
            return {name: _copy(one) for name, one in mine[0].items()}, {RANKS: everyone}
    weights = [one["weights"] for one in everyone]
    return {name: _mean([one[name] for one in weights]) for name in mine[0]}, {RANKS: everyone}


def load_states(trainer: Trainer, world: World, checkpoint: Checkpoint) -> list[str]:
    """Load a checkpoint into the model and the optimizer. Return lines to report.

    Raises the errors of `load_state_dict` where it does not fit.
    """
    ranks = checkpoint.optimizer.get(RANKS)
    if ranks is not None and len(ranks) == world.size and trainer.reducer.traits.state.differs:
        trainer.model.load_state_dict(ranks[world.rank]["weights"])
        load_optimizer(trainer.optimizer, ranks[world.rank]["optimizer"])
        trainer.reducer.programs.resume(checkpoint.step, ranks[world.rank].get("rule"))
        return []
    trainer.reducer.programs.resume(checkpoint.step)
    if ranks is None:
        trainer.model.load_state_dict(checkpoint.weights)
        own = cut_optimizer_state(trainer.model, trainer.optimizer, checkpoint.optimizer)
        load_optimizer(trainer.optimizer, own)
        return []
    trainer.model.load_state_dict(checkpoint.weights)
    anchored = any(ANCHOR in one.get("rule", {}).get("kept", ()) for one in ranks)
    begin = "the anchor, their weights after the last outer steps" if anchored else "the mean of the weights"
    return [
        f"the run had {len(ranks)} ranks with weights of their own: all begin with {begin}, and with no state of the "
        "optimizer"
    ]


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load the state of an optimizer, which keeps its options: those of the recipe, which may be new."""
    options = [{name: one for name, one in group.items() if name != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, option in zip(optimizer.param_groups, options, strict=True):
        group.update(option)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _mean(values: list[torch.Tensor]) -> torch.Tensor:
    first = values[0]
    if not (first.is_floating_point() or first.is_complex()):
        return first
    return torch.stack(values).mean(0)
