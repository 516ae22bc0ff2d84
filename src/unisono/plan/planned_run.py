"""Run that is planned: a traced model, a rule and their settings on nodes of a machine, checked before a prediction.

minibatch 256, 4 nodes, 2 ranks a node     ─▶  64 samples for a node, 32 for a rank
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil

from unisono.errors import UsageError
from unisono.plan.collective_costs import check_ranks
from unisono.plan.exchange_cost import ExchangeCost, exchange_cost
from unisono.plan.loading import Loading, SampleFacts, loading_of
from unisono.plan.machines import MachineFacts
from unisono.plan.split import SplitModel
from unisono.plan.trace import TracedLayer
from unisono.rules import BaseRule
from unisono.step.rule import Members, RankState


@dataclass(frozen=True)
class PlannedRun:
    """Run on a number of nodes; `dataclasses.replace` gives it on others."""

    machine: MachineFacts
    layers: Sequence[TracedLayer]
    traced: int
    """Samples that the layers were traced for."""
    rule: BaseRule
    minibatch: int
    """Samples of a step, over all ranks."""
    nodes: int = 1
    ranks_per_node: int = 1
    rule_name: str = "bsp"
    kept: float = 1.0
    """Numbers that the optimizer keeps for each weight."""
    clip: float | None = None
    """Largest norm of all gradients together."""
    layer_norms: bool = False
    """True where the optimizer's step needs norms of whole layers."""
    samples: SampleFacts = field(default_factory=SampleFacts)
    """Samples as they are stored and loaded."""
    epoch_samples: int | None = None
    """Training samples of an epoch; None: not known."""
    test_samples: int = 0
    epochs: int = 1
    checkpoint_every: int = 0
    """Steps between two checkpoints within an epoch; 0: there are none."""
    autotunes: bool = False
    """True where convolutions are timed before the first step."""
    split: SplitModel | None = None
    """Model whose layers can be split; None: no layer is."""

    @property
    def ranks(self) -> int:
        """Number of ranks on all nodes."""
        return self.nodes * self.ranks_per_node

    @property
    def samples_of_rank(self) -> int:
        """Samples of a step on the rank that has most."""
        return ceil(self.minibatch / self.ranks)

    @property
    def loading(self) -> Loading:
        """Loading of a step's samples on the node that has most."""
        return loading_of(self.machine, self.samples, ceil(self.minibatch / self.nodes), self.ranks_per_node)

    @cached_property
    def exchange(self) -> ExchangeCost:
        """Cost of the rule's exchanges."""
        kind = self.rule.exchange.wire, self.rule.traits.state is RankState.SHARDED, self.rule.algorithm
        return exchange_cost(self.machine, self.nodes, self.ranks_per_node, *kind)


def check_run(run: PlannedRun) -> None:
    """Raise UsageError for a run that cannot be made, or that cannot be predicted."""
    machine = run.machine
    check_ranks(run.ranks)
    if run.minibatch < run.ranks:
        raise UsageError(
            f"a minibatch of {run.minibatch} is less than a sample for each of {run.ranks} ranks: "
            f"plan a minibatch of {run.ranks}, or fewer nodes"
        )
    if not machine.node.flops:
        raise UsageError(f"{machine.name} has no node.flops: give a file with the FLOPs per second of a node")
    if not machine.link.bandwidth and run.nodes > 1:
        raise UsageError(f"{machine.name} has no link.bandwidth: give a file with the bytes per second of an adapter")
    if not any(layer.parameters for layer in run.layers):
        raise UsageError("the model has no parameters, so there is nothing to exchange: plan another")
    if run.rule.traits.members is Members.SERVERS:
        raise UsageError(
            f"rule {run.rule_name} has no step that all ranks make together, so it is not predicted: plan bsp, "
            "sharded, local_sgd or diloco, or measure a short run of it"
        )
