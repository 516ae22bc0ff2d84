"""Settings of a run that is planned, and their checks before anything is predicted.

minibatch 256, nodes 1 2 4, 2 ranks a node     ─▶  256, 128, 64 samples for a node, half of them for a rank
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from unisono.errors import UsageError
from unisono.plan.collective_costs import check_ranks
from unisono.plan.loading import SampleFacts
from unisono.plan.machines import MachineFacts
from unisono.plan.trace import TracedLayer
from unisono.plan.unequal import Unequal
from unisono.rules import BaseRule
from unisono.step.rule import Members


@dataclass(frozen=True)
class RunSettings:
    """Settings of the runs that are planned."""

    minibatch: int
    """Samples of a step, over all ranks."""
    nodes: tuple[int, ...]
    rules: Mapping[str, BaseRule]
    """Rules by the words that name them."""
    traced: int
    """Samples that the layers were traced for."""
    ranks_per_node: int = 1
    kept: float = 1.0
    """Numbers that the optimizer keeps for each weight."""
    clip: float | None = None
    """Largest norm of all gradients together."""
    layer_norms: bool = False
    """True where the optimizer's step needs norms of whole layers."""
    epoch_samples: int | None = None
    samples: SampleFacts = field(default_factory=SampleFacts)
    """Samples as they are stored and loaded."""
    slow_nodes: Mapping[int, float] = field(default_factory=dict)
    """Times that a node computes as long as others, by its number."""
    simulated: bool = False
    """True where collectives between nodes have their simulated seconds, each bucket size by itself."""


def check_settings(layers: Sequence[TracedLayer], machine: MachineFacts, settings: RunSettings) -> None:
    """Raise UsageError for settings that no run can have, or that cannot be predicted."""
    most = max(settings.nodes) * settings.ranks_per_node
    check_ranks(most)
    if settings.minibatch < most:
        raise UsageError(
            f"a minibatch of {settings.minibatch} is less than a sample for each of {most} ranks: "
            f"plan a minibatch of {most}, or fewer nodes"
        )
    if not machine.node.flops:
        raise UsageError(f"{machine.name} has no node.flops: give a file with the FLOPs per second of a node")
    if not machine.link.bandwidth and max(settings.nodes) > 1:
        raise UsageError(f"{machine.name} has no link.bandwidth: give a file with the bytes per second of an adapter")
    if not any(layer.parameters for layer in layers):
        raise UsageError("the model has no parameters, so there is nothing to exchange: plan another")
    for words, rule in settings.rules.items():
        if rule.traits.members is Members.SERVERS:
            raise UsageError(
                f"rule {words} has no step that all ranks make together, so it is not predicted: plan bsp, sharded, "
                "local_sgd or diloco, or measure a short run of it"
            )
    for node, factor in settings.slow_nodes.items():
        if node >= max(settings.nodes):
            raise UsageError(f"there is no node {node}: nodes are 0 to {max(settings.nodes) - 1}")
        if not 1 <= factor < float("inf"):
            raise UsageError(f"node {node} computes {factor:g} times as long; give 1 or more")


def samples_of_rank(settings: RunSettings, nodes: int) -> int:
    """Return the samples of a step on the rank that has most."""
    return ceil(settings.minibatch / (nodes * settings.ranks_per_node))


def samples_of_node(settings: RunSettings, nodes: int) -> int:
    """Return the samples of a step on the node that has most."""
    return ceil(settings.minibatch / nodes)


def slowest_node(settings: RunSettings, nodes: int) -> float:
    """Return the times that the slowest of the first `nodes` nodes computes as long as others."""
    return Unequal(nodes=settings.slow_nodes).among(nodes).slowest
