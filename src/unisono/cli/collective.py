"""Common parts of `unisono price` and `unisono simulate`: the options of a collective, and its description as data."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unisono.cli.units import parse_bytes, parse_seconds
from unisono.errors import UsageError
from unisono.view.words import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from unisono.choosing.schedule_table import ScheduleTable
    from unisono.placement import Placement
    from unisono.plan.collective_costs import CollectiveCase, LeftOut

LATENCY_SECONDS = 25e-6
"""Latency of a network that is described by its rate alone."""

CollectiveOption = Annotated[
    str, typer.Option("--collective", help="allreduce, reduce_scatter, all_gather, broadcast or all_to_all.")
]
BytesOption = Annotated[str, typer.Option("--bytes", help="Payloads of a rank, separated by commas: 4KiB,1MiB.")]
RanksOption = Annotated[int, typer.Option("--ranks", help="Number of ranks.")]
RanksPerNodeOption = Annotated[int, typer.Option("--ranks-per-node", help="Number of ranks on each node.")]
SupernodesOption = Annotated[
    int | None,
    typer.Option("--supernodes", help="Number of supernodes (switches); default: 1, or as the machine has them."),
]
MachineOption = Annotated[str | None, typer.Option("--machine", help="Name of a machine, or its TOML file.")]
TableOption = Annotated[Path | None, typer.Option("--table", help="Table of `unisono tune`: its network and choices.")]
RateOption = Annotated[str | None, typer.Option("--rate", help="Rate of a node's link, each way: 10gbit.")]
LatencyOption = Annotated[
    str | None, typer.Option("--latency", help="Latency of a message, with --rate; default: 25us.")
]
OversubscribeOption = Annotated[
    float | None,
    typer.Option("--oversubscribe", help="Sum of a supernode's rates over its uplink's, with --rate; default: 1."),
]
WireOption = Annotated[str | None, typer.Option("--wire", help="Encoding of messages: bfloat16, float16, int8, int4.")]
AlgorithmsOption = Annotated[
    str | None, typer.Option("--algorithms", help="Schedules, separated by commas; default: all of the collective.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def sizes_of(text: str) -> list[int]:
    """Return the payloads in bytes. Raises UsageError for anything but sizes."""
    return [parse_bytes(size) for size in text.split(",")]


def names_of(text: str | None) -> list[str]:
    """Return the schedules that were named."""
    return [] if text is None else [name for name in text.split(",") if name]


def case_of(
    collective: str,
    ranks: int,
    ranks_per_node: int,
    supernodes: int | None,
    machine: str | None,
    table: Path | None,
    rate: str | None,
    latency: str | None,
    oversubscribe: float | None,
    wire: str | None,
) -> CollectiveCase:
    """Return the collective that the options describe. Raises UsageError for options that do not fit each other."""
    from unisono.plan.collective_costs import CollectiveCase, check_ranks

    sources = {"--machine": machine, "--table": table, "--rate": rate}
    given = [option for option, value in sources.items() if value is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} each describe the network; give one of them")
    for option, value in (("--latency", latency), ("--oversubscribe", oversubscribe)):
        if value is not None and rate is None:
            raise UsageError(f"{option} {value} is for a network given by --rate; {given[0] if given else 'add it'}")
    if ranks < 1:
        raise UsageError(f"--ranks {ranks}: the number of ranks must be at least 1")
    check_ranks(ranks)
    if ranks_per_node < 1 or ranks % ranks_per_node:
        raise UsageError(f"--ranks-per-node {ranks_per_node}: {ranks} ranks do not fill nodes of as many")
    nodes = ranks // ranks_per_node
    if supernodes is not None and (supernodes < 1 or nodes % supernodes):
        raise UsageError(f"--supernodes {supernodes}: {nodes} nodes do not spread evenly over {supernodes} supernodes")
    nodes_each = nodes // (supernodes or 1)
    choices, nodes_each = _table(machine, table, rate, latency, oversubscribe, nodes_each, supernodes is not None)
    return CollectiveCase(collective, _placement(nodes, ranks_per_node, nodes_each), choices, wire)


def _table(
    machine: str | None,
    table: Path | None,
    rate: str | None,
    latency: str | None,
    oversubscribe: float | None,
    nodes_each: int,
    fixed: bool,
) -> tuple[ScheduleTable, int]:
    """Return the table with the network, and the nodes of a supernode: the machine's, unless they are `fixed`."""
    from dataclasses import replace

    from unisono.choosing.schedule_table import read_table
    from unisono.lab.plan import parse_rate
    from unisono.network import shaped
    from unisono.plan.machines import find_machine

    choices = read_table(table)
    if machine is not None:
        facts = find_machine(machine)
        each = nodes_each if fixed else facts.topology.supernode or nodes_each
        return replace(choices, network=facts.network()), each
    if rate is None:
        return choices, nodes_each
    alpha = LATENCY_SECONDS if latency is None else parse_seconds(latency, "--latency ")
    narrow = 1.0 if oversubscribe is None else oversubscribe
    if not 0 < narrow < float("inf"):
        raise UsageError(f"--oversubscribe {narrow:g}: give a number above 0; 1 is not over-subscribed")
    return replace(choices, network=shaped(parse_rate(rate), nodes_each, narrow, alpha)), nodes_each


def _placement(nodes: int, ranks_per_node: int, nodes_each: int) -> Placement:
    from unisono.placement import place

    node_of_rank = [rank // ranks_per_node for rank in range(nodes * ranks_per_node)]
    return place(node_of_rank, [node // nodes_each for node in node_of_rank])


def describe(case: CollectiveCase) -> str:
    """Return a line with the collective, the ranks and the network."""
    placement, network = case.placement, case.table.network
    supernodes = len(set(placement.supernodes)) or 1
    sums = f"sums at {1e-9 / network.gamma:.4g} GB/s" if network.gamma else "sums free"
    words = [
        f"{case.collective}, {placement.ranks} ranks on {len(placement.nodes)} nodes in {supernodes} "
        f"supernode{'s' * (supernodes > 1)}: links of {8e-9 / network.beta:.4g} Gbit/s, latency "
        f"{format_seconds(float(network.alpha))}, {sums}"
    ]
    words += (
        [f"uplinks of {8e-9 / (network.uplink_beta or 1):.4g} Gbit/s"]
        if supernodes > 1 and network.oversubscribed
        else []
    )
    words += [f"wire {case.wire}"] if case.wire is not None else []
    words += [] if network.measured else ["an unknown network (no --machine, --table or --rate)"]
    return ", ".join(words)


def as_data(case: CollectiveCase, left_out: Sequence[LeftOut]) -> dict[str, Any]:
    """Return the case as data for JSON."""
    return {
        "collective": case.collective,
        "ranks": case.placement.ranks,
        "nodes": len(case.placement.nodes),
        "supernodes": len(set(case.placement.supernodes)) or 1,
        "wire": case.wire,
        "network": {name: None if value is None else float(value) for name, value in vars(case.table.network).items()},
        "left_out": {name: one.reason for one in left_out for name in one.schedules},
    }


def print_left_out(left_out: Sequence[LeftOut]) -> None:
    """Print a line for each reason for which schedules are left out."""
    for one in left_out:
        of_base = Counter(name.partition("/")[0] for name in one.schedules)
        groups = [name for name in one.schedules if of_base[name.partition("/")[0]] == 1]
        groups += [f"{base} (all {count})" for base, count in of_base.items() if count > 1]
        print(f"left out: {', '.join(groups)}: {one.reason}")


def title(nbytes: int, bound: float, auto: str) -> str:
    """Return the line above the table of a size."""
    takes = "the MPI library, which has no schedule to price" if auto == "library" else auto
    return f"{format_bytes(nbytes)}: bound of the links {format_seconds(bound)}, auto takes {takes}"


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns: the first one to the left, the others to the right."""
    from unisono.plan.text_table import text_table

    print("\n".join(text_table([head, *rows], left={0})))
