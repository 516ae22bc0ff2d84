"""`unisono price` and `unisono simulate`: cost of a collective, by the closed formula and flow by flow."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import Signature, signature
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from unisono.errors import UsageError
from unisono.formats import MAX_DIGITS, column_table, counted, format_bytes, format_seconds, parse_bytes, parse_seconds

if TYPE_CHECKING:
    from unisono.network import Uneven
    from unisono.placement import Placement
    from unisono.plan.collective_costs import CollectiveCase, LeftOut
LATENCY = "25us"
"""Latency of a network that is described by its rate alone."""

MAX_GROUPS = 6
"""Largest number of groups of ranks whose ends are printed; JSON has all."""

BytesOption = Annotated[str, Option("--bytes", help="Payloads of a rank, separated by commas: 4KiB,1MiB.")]
AlgorithmsOption = Annotated[
    str | None, Option("--algorithms", help="Schedules, separated by commas; default: all of the collective.")
]
JsonOption = Annotated[bool, Option("--json", help="Print JSON instead of tables.")]


def case_of(
    ranks: Annotated[int, Option(help="Number of ranks.")],
    collective: Annotated[
        str, Option(help="allreduce, reduce_scatter, all_gather, broadcast or all_to_all.")
    ] = "allreduce",
    ranks_per_node: Annotated[int, Option(help="Number of ranks on each node.")] = 1,
    supernodes: Annotated[
        int | None, Option(help="Number of supernodes (switches); default: 1, or as the machine has them.")
    ] = None,
    machine: Annotated[str | None, Option(help="Name of a machine, or its TOML file.")] = None,
    table: Annotated[Path | None, Option(help="Table of `unisono tune`: its network and choices.")] = None,
    rate: Annotated[str | None, Option(help="Rate of a node's link, each way: 10gbit.")] = None,
    latency: Annotated[str | None, Option(help=f"Latency of a message, with --rate; default: {LATENCY}.")] = None,
    oversubscribe: Annotated[
        float | None, Option(help="Sum of a supernode's rates over its uplink's, with --rate; default: 1.")
    ] = None,
    wire: Annotated[
        str | None, Option(help="Encoding of messages: float32, bfloat16, float16, int8, int4 or exact.")
    ] = None,
) -> Any:
    """Return the collective that the options describe, and the slow links of its machine by node.

    Raises UsageError for options that do not fit each other.
    """
    from dataclasses import replace

    from unisono.lab.plan import parse_rate
    from unisono.network import shaped
    from unisono.network.choice import read_table
    from unisono.plan.collective_costs import CollectiveCase, placement_of, uneven_of
    from unisono.plan.machines import find_machine

    sources = {"--machine": machine, "--table": table, "--rate": rate}
    given = [option for option, value in sources.items() if value is not None]
    _check(given, ranks, ranks_per_node, supernodes, latency, oversubscribe)
    nodes = ranks // ranks_per_node
    nodes_each, choices = nodes // (supernodes or 1), read_table(table)
    slow_nodes: Mapping[int, float] = {}
    if machine is not None:
        facts = find_machine(machine)
        if not facts.link.bandwidth:
            raise UsageError(f"--machine {machine}: it has no bandwidth in [link], so it prices no message")
        slow_nodes = uneven_of(facts, nodes).slow_nodes
        choices = replace(choices, network=facts.network())
        nodes_each = nodes_each if supernodes is not None else facts.topology.supernode or nodes_each
    elif rate is not None:
        alpha = parse_seconds(LATENCY if latency is None else latency, "--latency ")
        choices = replace(choices, network=shaped(parse_rate(rate), nodes_each, oversubscribe or 1.0, alpha))
    return CollectiveCase(collective, placement_of(nodes, ranks_per_node, nodes_each), choices, wire), slow_nodes


def _check(
    given: Sequence[str],
    ranks: int,
    ranks_per_node: int,
    supernodes: int | None,
    latency: str | None,
    oversubscribe: float | None,
) -> None:
    """Raise UsageError for options of `case_of` that do not fit each other; those `given` describe the network."""
    from unisono.plan.machines import check_ranks

    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} each describe the network; give one of them")
    for option, value in (("--latency", latency), ("--oversubscribe", oversubscribe)):
        if value is not None and "--rate" not in given:
            raise UsageError(f"{option} {value} is for a network given by --rate; {given[0] if given else 'add it'}")
    if oversubscribe is not None and not 0 < oversubscribe < float("inf"):
        raise UsageError(f"--oversubscribe {oversubscribe:g}: give a number above 0; 1 is not over-subscribed")
    if ranks < 1:
        raise UsageError(f"--ranks {ranks}: the number of ranks must be at least 1")
    check_ranks(ranks)
    if ranks_per_node < 1 or ranks % ranks_per_node:
        raise UsageError(f"--ranks-per-node {ranks_per_node}: {ranks} ranks do not fill nodes of as many")
    nodes = ranks // ranks_per_node
    if supernodes is not None and (supernodes < 1 or nodes % supernodes):
        raise UsageError(f"--supernodes {supernodes}: {nodes} nodes do not spread evenly over {supernodes} supernodes")
    if oversubscribe is not None and (supernodes or 1) == 1:
        raise UsageError(f"--oversubscribe {oversubscribe:g} is for several supernodes; add --supernodes")


def with_case(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with the options of `case_of` before its own: its first two arguments are what they give."""
    shared, own = (signature(function, eval_str=True).parameters for function in (case_of, command))

    @wraps(command)
    def run(**given: Any) -> None:
        command(*case_of(**{name: given.pop(name) for name in shared}), **given)

    parameters = [*shared.values(), *list(own.values())[2:]]
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]  # Typer reads it, and the annotations
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


@with_case
def price(
    case: Any,
    _slow_nodes: Any,
    sizes: BytesOption = "4KiB,1MiB,64MiB",
    algorithms: AlgorithmsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Price a collective by the closed formula: seconds, rounds, bytes and share of the bound, for each schedule.

    The formula prices the busiest rank and knows no waits between ranks; `unisono simulate` plays all of them.
    """
    from unisono.plan.collective_costs import price_schedule, schedules_of

    payloads = [parse_bytes(size) for size in sizes.split(",")]
    schedules, left_out = schedules_of(case, [name for name in (algorithms or "").split(",") if name])
    by_schedule = [price_schedule(case, name, payloads) for name in schedules]
    by_size = [
        _size(case, nbytes, case.bound(nbytes), [row._asdict() for row in rows])
        for nbytes, *rows in zip(payloads, *by_schedule, strict=True)
    ]
    _show(case, left_out, by_size, PRICED, as_json)


@with_case
def simulate(
    case: Any,
    slow_nodes: Any,
    sizes: BytesOption = "1MiB",
    algorithms: AlgorithmsOption = None,
    slow_links: Annotated[
        list[str] | None, Option("--slow-link", help="RANK:FACTOR, the link of its node is that many times slower.")
    ] = None,
    late: Annotated[list[str] | None, Option("--late", help="RANK:SECONDS, it enters that much later: 3:5ms.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate a collective flow by flow: seconds, the end of each rank, and what the slowest waits for.

    The slow links of a machine file count; --slow-link goes before them. The price beside it knows neither slow links
    nor late ranks. --slow-link and --late may be repeated.
    """
    from unisono.plan.collective_costs import schedules_of

    payloads = [parse_bytes(size) for size in sizes.split(",")]
    uneven = _uneven(slow_nodes, slow_links or [], late or [], case.placement)
    schedules, left_out = schedules_of(case, [name for name in (algorithms or "").split(",") if name])
    by_size = [
        _size(case, nbytes, case.bound(nbytes, uneven), _simulated(case, nbytes, schedules, uneven, left_out))
        for nbytes in payloads
    ]
    if not any(size["schedules"] for size in by_size):
        raise UsageError(left_out[-1].reason)
    beside = {"slow_nodes": dict(uneven.slow_nodes), "late_ranks": dict(uneven.late_ranks)}
    _show(case, left_out, by_size, SIMULATED, as_json, beside)


def _uneven(slow: Mapping[int, float], slow_links: Sequence[str], late: Sequence[str], placement: Placement) -> Uneven:
    """Return the slow links of the machine, `slow`, with the differences that the options name.

    Raises UsageError for their form, and for ranks out of range.
    """
    from unisono.network import Uneven

    slow_nodes = dict(slow)
    for text in slow_links:
        rank, factor = _rank_and_value(text, "--slow-link", "RANK:FACTOR, such as 3:4", placement.ranks)
        try:
            slow_nodes[placement.node_of(rank)] = float(factor)
        except ValueError:
            raise UsageError(f"--slow-link {text}: write RANK:FACTOR, such as 3:4") from None
    late_ranks: dict[int, float] = {}
    for text in late:
        rank, seconds = _rank_and_value(text, "--late", "RANK:SECONDS, such as 3:5ms", placement.ranks)
        late_ranks[rank] = parse_seconds(seconds, f"--late {rank}:")
    return Uneven(slow_nodes, late_ranks)


def _rank_and_value(text: str, option: str, form: str, ranks: int) -> tuple[int, str]:
    rank, colon, value = text.partition(":")
    if not (rank.isdecimal() and colon and value):
        raise UsageError(f"{option} {text}: write {form}")
    if len(rank) > MAX_DIGITS or int(rank) >= ranks:
        raise UsageError(f"{option} {text}: there is no rank {rank}; ranks are 0 to {ranks - 1}")
    return int(rank), value


# Results, as data for JSON


def _size(case: CollectiveCase, nbytes: int, bound: float, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the rows of a size, quickest first, with the bound of the links and the choice of `auto`."""
    from unisono.plan.collective_costs import choose_auto

    quickest_first = sorted(rows, key=lambda row: row["seconds"])
    schedules = [{**row, "share_of_bound": bound / row["seconds"]} for row in quickest_first]
    return {"bytes": nbytes, "bound_seconds": bound, "auto": choose_auto(case, nbytes), "schedules": schedules}


def _simulated(
    case: CollectiveCase, nbytes: int, schedules: Sequence[str], uneven: Uneven, left_out: list[LeftOut]
) -> list[dict[str, Any]]:
    """Return the simulation of each schedule; add those with too many messages to `left_out`."""
    from unisono.network import NetworkError
    from unisono.plan.collective_costs import LeftOut, price_schedule, simulate_schedule

    rows = []
    for name in schedules:
        try:
            done = simulate_schedule(case, name, nbytes, uneven)
        except NetworkError as error:
            left_out.append(LeftOut((name,), f"{format_bytes(nbytes)}: {error}"))
            continue
        delays = [{**delay._asdict(), "cause": delay.cause.value} for delay in done.delays]
        row = {key: getattr(done, key) for key in ("seconds", "ends", "exact", "bottleneck")} | {"delays": delays}
        rows.append({"schedule": name, **row, "price_seconds": price_schedule(case, name, [nbytes])[0].seconds})
    return rows


# Results, as text

Row = Mapping[str, Any]

Columns = Mapping[str, Callable[[Row], str]]
"""Columns of the table of a size: head, and cell of a row."""


def _end(which: Callable[[Sequence[float]], float]) -> Callable[[Row], str]:
    """Return the cell of the first or the last end, with its rank."""
    return lambda row: f"{format_seconds(which(row['ends']))} ({row['ends'].index(which(row['ends']))})"


PRICED: Columns = {
    "price": lambda row: format_seconds(row["seconds"]),
    "rounds": lambda row: str(row["rounds"]),
    "sent by a rank": lambda row: format_bytes(row["sent_bytes"]),
    "bound / price": lambda row: f"{row['share_of_bound']:.1%}",
}

SIMULATED: Columns = {
    "simulated": lambda row: ("" if row["exact"] else "about ") + format_seconds(row["seconds"]),
    "price": lambda row: format_seconds(row["price_seconds"]),
    "bound / simulated": lambda row: f"{row['share_of_bound']:.1%}",
    "first rank ends": _end(min),
    "last rank ends": _end(max),
}


def _show(
    case: CollectiveCase,
    left_out: Sequence[LeftOut],
    sizes: Sequence[Row],
    columns: Columns,
    as_json: bool,
    beside: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Print a table of these columns for each size, or all as JSON, with what is `beside` the sizes there."""
    if as_json:
        network = {name: None if value is None else float(value) for name, value in vars(case.table.network).items()}
        data = {
            "collective": case.collective,
            "ranks": case.placement.ranks,
            "nodes": len(case.placement.nodes),
            "supernodes": len(set(case.placement.supernodes)) or 1,
            "wire": case.wire,
            "network": network,
            "left_out": {name: entry.reason for entry in left_out for name in entry.schedules},
        }
        print(json.dumps({**data, **beside, "sizes": sizes}, indent=1))
        return
    print(describe(case))
    for size in sizes:
        auto = size["auto"]
        rows = [{**row, "mark": "auto" * (row["schedule"] == auto)} for row in size["schedules"]]
        takes = "the MPI library, which has no schedule to price" if auto == "library" else auto
        bound = format_seconds(size["bound_seconds"])
        print(f"\n{format_bytes(size['bytes'])}: bound of the links {bound}, auto takes {takes}")
        shown: Columns = {"schedule": itemgetter("schedule"), **columns, "": itemgetter("mark")}
        print("\n".join(column_table(list(shown.items()), rows, left={0})))
        if columns is SIMULATED:
            print()
            for row in rows:
                print(f"{row['schedule']}: {row['bottleneck']}; ends: {_ends(row['ends'])}")
    print()
    for entry in left_out:
        of_base = Counter(name.partition("/")[0] for name in entry.schedules)
        groups = [name for name in entry.schedules if of_base[name.partition("/")[0]] == 1]
        groups += [f"{base} (all {count})" for base, count in of_base.items() if count > 1]
        print(f"left out: {', '.join(groups)}: {entry.reason}")


def describe(case: CollectiveCase) -> str:
    """Return a line with the collective, the ranks and the network."""
    placement, network = case.placement, case.table.network
    supernodes = len(set(placement.supernodes)) or 1
    sums = f"sums at {1e-9 / network.gamma:.4g} GB/s" if network.gamma else "sums free"
    where = f"{placement.ranks} ranks on {len(placement.nodes)} nodes in {counted(supernodes, 'supernode')}"
    links = f"links of {8e-9 / network.beta:.4g} Gbit/s, latency {format_seconds(float(network.alpha))}"
    parts = [f"{case.collective}, {where}: {links}, {sums}"]
    if supernodes > 1 and network.oversubscribed:
        parts.append(f"uplinks of {8e-9 / (network.uplink_beta or 1):.4g} Gbit/s")
    if case.wire is not None:
        parts.append(f"wire {case.wire}")
    if not network.measured:
        parts.append("an unknown network (no --machine, --table or --rate)")
    return ", ".join(parts)


def _ends(ends: Sequence[float]) -> str:
    """Return the ends of all ranks, neighbours of equal times together."""
    groups = []
    for text, some in groupby(range(len(ends)), lambda rank: format_seconds(ends[rank])):
        members = list(some)
        groups.append(f"{text} rank{f's {members[0]}-{members[-1]}' if members[1:] else f' {members[0]}'}")
    more = [f"{len(groups) - MAX_GROUPS} more in --json"] if len(groups) > MAX_GROUPS else []
    return ", ".join([*groups[:MAX_GROUPS], *more])
