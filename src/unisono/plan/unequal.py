"""Unequal nodes of a planned run: slow links, and nodes that compute slowly. All others wait for them.

    node 3   ──backward, 2 times as long──────────▶│ allreduce │      computes twice as long
    others   ──backward──────────▶│ they wait      │ allreduce │

A collective begins when its last rank has arrived, and ends on all ranks at once. So a step with one slow node is that
with all nodes as slow: by no rule that averages do the others get ahead, also not by one that exchanges once a period.
A slow link makes collectives longer. Those that were measured over it contain it; those that were measured without it
hold no more (`with_slow_links`).

Worked example: a step of 100 ms is one of 71 ms without node 3's slow link. The link costs 29 ms, 1.4 times the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf

from unisono.plan.machines import MachineFacts
from unisono.step.costs import Computing

LEAST_COST = 0.01
"""Share of a step from which a slow link or node is named."""


@dataclass(frozen=True)
class Unequal:
    """Nodes with slow links, and slow nodes, each with the times that it takes as long as others."""

    links: Mapping[int, float] = field(default_factory=dict)
    nodes: Mapping[int, float] = field(default_factory=dict)

    def among(self, nodes: int) -> Unequal:
        """Return those of the first `nodes` nodes."""
        return Unequal(*({node: times for node, times in some.items() if node < nodes} for some in self.both))

    @property
    def both(self) -> tuple[Mapping[int, float], Mapping[int, float]]:
        """Slow links, then slow nodes."""
        return self.links, self.nodes

    @property
    def slowest(self) -> float:
        """Times that the slowest node computes as long as others."""
        return max(self.nodes.values(), default=1.0)


def with_slow_links(machine: MachineFacts, links: Mapping[int, float]) -> MachineFacts:
    """Return the machine with these factors of links beside its own, without the rows of collectives that they change:
    those on nodes one of whose links has another factor than in the machine file."""
    changed = [node for node, times in links.items() if times != machine.slow_links.get(node, 1.0)]
    first = min(changed, default=inf)
    rows = tuple(row for row in machine.collectives if row.nodes == 1 or row.nodes <= first)
    slow = {node: times for node, times in {**machine.slow_links, **links}.items() if times > 1}
    return replace(machine, slow_links=slow, collectives=rows)


def slowed(computing: Computing, times: float) -> Computing:
    """Return the computing of a node that takes this many times as long for it; its updates take as long as others'."""
    needed, ready = (tuple(one * times for one in some) for some in (computing.needed, computing.ready))
    return replace(computing, needed=needed, ready=ready, whole=computing.whole * times)


def cost_of(unequal: Unequal, step: float, without_links: float, without_nodes: float) -> str:
    """Return a sentence with the node that costs the step most, or "" if none does.

    `without_links` and `without_nodes` are the seconds of a step whose links or nodes are all equal.
    """
    kind, without, some = "link", without_links, unequal.links
    if without_nodes < without_links:
        kind, without, some = "computing", without_nodes, unequal.nodes
    if step - without < LEAST_COST * step or not some:
        return ""
    node = max(some, key=lambda one: some[one])
    others = f" (the slowest of {len(some)})" if len(some) > 1 else ""
    return (
        f"node {node}'s {kind}{others}, {some[node]:g} times slower: {(step - without) * 1e3:.3g} ms of the step; "
        f"without it {step / without:.3g} times as fast"
    )
