"""BSP, bulk synchronous parallel: all ranks agree at every step (Theano-MPI section 3.1).

rank 0   forward  backward ─┐                ┌─ update   forward ...
rank 1   forward  backward ─┴── sum of all ──┴─ update   forward ...
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from unisono.errors import UsageError
from unisono.gradients import Exchange, Gradients, gradients_of
from unisono.gradients.likeness import compare_models
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
        prepare(model)
        compare_models(model, world)
        agree_on_state(model, world)
        return Gradients(model, world, self.exchange, self.embedding)


def prepare(model: torch.nn.Module) -> None:
    """Raise UsageError for a model that cannot be made parallel; one whose parameters have changed since can, again."""
    gradients = gradients_of(model)
    parts = (gradients_of(module) for module in model.modules() if module is not model)
    if any(part is not None for part in parts) or (gradients is not None and not gradients.differs(model)):
        raise UsageError("the model, or a part of it, is parallel already: call unisono.parallel once")
    for name, module in model.named_modules():
        sparse = isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse
        if sparse and module.weight.requires_grad:
            raise UsageError(f"{name or 'the model'} gives sparse gradients, which are not averaged: use sparse=False")
    if gradients is not None:
        gradients.release()


def agree_on_state(model: torch.nn.Module, world: World) -> None:
    """Give all ranks the weights and buffers of rank 0."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            world.broadcast(tensor)
