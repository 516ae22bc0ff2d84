"""BSP, bulk synchronous parallel: all ranks agree at every step (Theano-MPI section 3.1).

rank 0   forward  backward ─┐                ┌─ update   forward ...
rank 1   forward  backward ─┴── sum of all ──┴─ update   forward ...
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from unisono.gradients import Gradients
from unisono.world import World


@dataclass(frozen=True)
class Exchange:
    """How gradients meet."""

    algorithm: str = "auto"
    """"auto" (what was measured, or else priced, chooses), "library", or the name of a schedule."""
    wire: str | None = None
    """The number format between nodes: "float32", "float16" or "bfloat16"; None for the gradients' own."""
    bucket_bytes: int = 128 << 20
    """The largest bucket. Few large ones are best while nothing else goes on during the exchange."""


@dataclass(frozen=True)
class BSP:
    """Every rank has the same weights before each step, and applies the same averaged gradients in it."""

    exchange: Exchange = field(default_factory=Exchange)

    def attach(self, model: torch.nn.Module, world: World) -> Gradients:
        """Give all ranks rank 0's weights and buffers, and have gradients averaged at the end of each backward pass."""
        agree_on_state(model, world)
        return Gradients(model, world, self.exchange.algorithm, self.exchange.bucket_bytes, self.exchange.wire)


def agree_on_state(model: torch.nn.Module, world: World) -> None:
    """Give all ranks the weights and buffers of rank 0."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            world.broadcast(tensor)
