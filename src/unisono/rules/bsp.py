"""BSP, bulk synchronous parallel: all ranks agree at every step (Theano-MPI section 3.1).

rank 0   forward  backward ─┐                ┌─ update   forward ...
rank 1   forward  backward ─┴── sum of all ──┴─ update   forward ...
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from unisono.gradients import Exchange, Gradients
from unisono.world import World


@dataclass(frozen=True)
class BSP:
    """Every rank has the same weights before each step, and applies the same averaged gradients in it."""

    exchange: Exchange = field(default_factory=Exchange)
    embedding: str = "auto"
    """Where the exchange sits in the step: "chain", "concurrent", "funnel" or "none" (`engine/embeddings/` draws them);
    "auto": what is predicted to be the fastest once the first steps were measured."""

    def attach(self, model: torch.nn.Module, world: World) -> Gradients:
        """Give all ranks rank 0's weights and buffers, and have gradients averaged in each backward pass."""
        agree_on_state(model, world)
        return Gradients(model, world, self.exchange, self.embedding)


def agree_on_state(model: torch.nn.Module, world: World) -> None:
    """Give all ranks the weights and buffers of rank 0."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            world.broadcast(tensor)
