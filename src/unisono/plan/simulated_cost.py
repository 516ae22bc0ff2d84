"""Simulated seconds of the buckets of a planned step on a machine, each size once.

buckets   8.39 MB  8.39 MB  7.34 MB  8.39 MB        sizes that are within 0.4% count as one
simulated │────────────────│ │─────│                 two simulations, by the schedule of the rule, or that of `auto`
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from unisono.choosing.schedule_table import ScheduleTable
from unisono.network import NetworkError
from unisono.network.estimate import estimate
from unisono.plan.choose import Candidate, PredictionInputs, Setting, predicted_again
from unisono.plan.collective_costs import CollectiveCase, choose_auto
from unisono.plan.exchange_cost import COLLECTIVES_OF_A_SHARD, network_of, placement_of, uneven_of
from unisono.plan.machines import MachineFacts
from unisono.plan.simulated_schedule import simulate_schedule
from unisono.rules import BaseRule
from unisono.schedules import find, names
from unisono.step.costs import Cost
from unisono.step.rule import AUTO, RankState
from unisono.wires import encoded_share

SIMULATED = "simulated"
"""Basis of the cost of exchanges that were simulated."""

SIZE_BITS = 9
"""Leading bits of a size that is simulated."""


class SimulatedCost(NamedTuple):
    """Seconds of an allreduce by bytes of a bucket."""

    seconds: dict[int, float]
    refused: dict[str, str]
    """Reason for each schedule that cannot be simulated on so many ranks, and whose seconds are estimates."""


def without_rows(machine: MachineFacts) -> MachineFacts:
    """Return the machine without the collectives that were measured between nodes, in whose place others are simulated:
    settings are then chosen by estimates of the same links."""
    return replace(machine, collectives=tuple(row for row in machine.collectives if row.nodes == 1))


def simulated_cost(
    machine: MachineFacts,
    nodes: int,
    ranks_per_node: int,
    wire: str | None,
    sizes: Iterable[int],
    algorithm: str = AUTO,
) -> SimulatedCost:
    """Return the seconds of an allreduce over `nodes` nodes, 2 at least, for buckets of these bytes of gradients.

    The schedule is `algorithm` where it offers an allreduce, else that which `auto` takes for each size. Raises
    UsageError for too many ranks, TensorError for an unknown wire.
    """
    placement = placement_of(machine, nodes, ranks_per_node)
    case = CollectiveCase("allreduce", placement, ScheduleTable({}, network_of(machine, ranks_per_node)), wire)
    uneven = uneven_of(machine, nodes)
    named = algorithm in names() and find(algorithm, placement).allreduce is not None
    refused: dict[str, str] = {}

    def seconds(nbytes: int) -> float:
        name = algorithm if named else choose_auto(case, nbytes)
        try:
            return simulate_schedule(case, name, nbytes, uneven).seconds
        except NetworkError as error:
            refused[name] = str(error)
            return float(estimate(case.algorithm(name), placement, case.network(), nbytes, uneven=uneven))

    wanted = {nbytes: rounded(nbytes) for nbytes in sizes}
    found = {nbytes: seconds(nbytes) for nbytes in sorted(set(wanted.values()))}
    return SimulatedCost({nbytes: found[size] for nbytes, size in wanted.items()}, refused)


def with_simulated(
    inputs: PredictionInputs, setting: Setting, machine: MachineFacts, nodes: int, ranks_per_node: int
) -> tuple[Candidate, dict[str, str]]:
    """Return the setting predicted with the simulated seconds of its buckets, and the schedules that were refused."""
    rule, cost = inputs.rule, inputs.cost
    sent = {bucket.nbytes for bucket in inputs.buckets(setting.bucket_bytes, setting.end_ratio)}
    found = simulated_cost(machine, nodes, ranks_per_node, rule.exchange.wire, sent, rule.algorithm)
    known = inputs._replace(simulated=charged(rule, cost, found.seconds))
    return predicted_again(setting, known), found.refused


def charged(rule: BaseRule, cost: Cost, seconds: Mapping[int, float]) -> dict[int, float]:
    """Return the seconds of a bucket's collectives from those of an allreduce, as `cost`, the line of that rule's
    exchanges, is charged: the all-gathers of a sharded rule are not encoded, and its flags have a latency as well."""
    if rule.traits.state is not RankState.SHARDED:
        return dict(seconds)
    share = encoded_share(rule.exchange.wire)
    of_allreduce = cost.latency * 2 / COLLECTIVES_OF_A_SHARD
    return {
        nbytes: cost.latency + max(0.0, took - of_allreduce) * (1 + 1 / share) / 2 for nbytes, took in seconds.items()
    }


def rounded(nbytes: int) -> int:
    """Return the next larger size of few leading bits, at most 0.4% larger.

    >>> rounded(1000), rounded(1001), rounded(102_760_512)
    (1000, 1002, 103022592)
    """
    unit = 1 << max(0, nbytes.bit_length() - SIZE_BITS)
    return -(-nbytes // unit) * unit
