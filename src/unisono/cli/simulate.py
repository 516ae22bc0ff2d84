"""`unisono simulate`: time of a collective, flow by flow, with slow links and late ranks."""

from __future__ import annotations

import json
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unisono.cli.collective import (
    AlgorithmsOption,
    BytesOption,
    CollectiveOption,
    JsonOption,
    LatencyOption,
    MachineOption,
    OversubscribeOption,
    RanksOption,
    RanksPerNodeOption,
    RateOption,
    SupernodesOption,
    TableOption,
    WireOption,
    as_data,
    case_of,
    describe,
    names_of,
    print_left_out,
    print_table,
    sizes_of,
    title,
)
from unisono.cli.units import MAX_DIGITS, parse_seconds
from unisono.errors import UsageError
from unisono.view.words import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from unisono.network import Uneven
    from unisono.placement import Placement
    from unisono.plan.collective_costs import CollectiveCase, LeftOut

HEAD = ("schedule", "simulated", "price", "bound / simulated", "first rank ends", "last rank ends", "")

MAX_GROUPS = 6
"""Largest number of groups of ranks whose ends are printed; JSON has all."""


def simulate(
    ranks: RanksOption,
    collective: CollectiveOption = "allreduce",
    sizes: BytesOption = "1MiB",
    ranks_per_node: RanksPerNodeOption = 1,
    supernodes: SupernodesOption = None,
    machine: MachineOption = None,
    table: TableOption = None,
    rate: RateOption = None,
    latency: LatencyOption = None,
    oversubscribe: OversubscribeOption = None,
    wire: WireOption = None,
    algorithms: AlgorithmsOption = None,
    slow_links: Annotated[
        list[str] | None,
        typer.Option("--slow-link", help="RANK:FACTOR, the link of its node is that many times slower."),
    ] = None,
    late: Annotated[
        list[str] | None, typer.Option("--late", help="RANK:SECONDS, it enters that much later: 3:5ms.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate a collective flow by flow: seconds, the end of each rank, and what the slowest waits for.

    The slow links of a machine file count; --slow-link goes before them. The price beside it knows neither slow links
    nor late ranks. --slow-link and --late may be repeated.
    """
    from unisono.plan.collective_costs import choose_auto, schedules_of
    from unisono.plan.exchange_cost import uneven_of
    from unisono.plan.machines import find_machine

    payloads = sizes_of(sizes)
    options = machine, table, rate, latency, oversubscribe, wire
    case = case_of(collective, ranks, ranks_per_node, supernodes, *options)
    own = uneven_of(find_machine(machine), len(case.placement.nodes)).slow_nodes if machine is not None else {}
    uneven = _uneven(own, slow_links or [], late or [], case.placement)
    schedules, left_out = schedules_of(case, names_of(algorithms))
    found = [_size(case, nbytes, choose_auto(case, nbytes), schedules, uneven, left_out) for nbytes in payloads]
    if not any(size["schedules"] for size in found):
        raise UsageError(left_out[-1].reason)
    if as_json:
        beside = {"slow_nodes": dict(uneven.slow_nodes), "late_ranks": dict(uneven.late_ranks)}
        print(json.dumps({**as_data(case, left_out), **beside, "sizes": found}, indent=1))
        return
    print(describe(case))
    for size in found:
        print(f"\n{title(size['bytes'], size['bound_seconds'], size['auto'])}")
        print_table(HEAD, [_cells(row, size["auto"]) for row in size["schedules"]])
        print()
        for row in size["schedules"]:
            print(f"{row['schedule']}: {row['bottleneck']}; ends: {_ends(row['ends'])}")
    print()
    print_left_out(left_out)


def _uneven(own: Mapping[int, float], slow_links: Sequence[str], late: Sequence[str], placement: Placement) -> Uneven:
    """Return the slow links of the machine, `own`, with the differences that the options name.

    Raises UsageError for their form, and for ranks out of range.
    """
    from unisono.network import Uneven

    slow_nodes = dict(own)
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


def _size(
    case: CollectiveCase,
    nbytes: int,
    auto: str,
    schedules: Sequence[str],
    uneven: Uneven,
    left_out: list[LeftOut],
) -> dict[str, Any]:
    """Return the simulations of a size as data, quickest first; add schedules with too many messages to `left_out`."""
    from unisono.network import NetworkError
    from unisono.plan.collective_costs import LeftOut, price_schedule, simulate_schedule

    bound = case.bound(nbytes, uneven)
    rows: list[dict[str, Any]] = []
    for name in schedules:
        try:
            done = simulate_schedule(case, name, nbytes, uneven)
        except NetworkError as error:
            left_out.append(LeftOut((name,), f"{format_bytes(nbytes)}: {error}"))
            continue
        rows.append(
            {
                "schedule": name,
                "seconds": done.seconds,
                "price_seconds": price_schedule(case, name, [nbytes])[0].seconds,
                "share_of_bound": bound / done.seconds,
                "exact": done.exact,
                "bottleneck": done.bottleneck,
                "delays": [
                    {"cause": delay.cause.value, "place": delay.place, "seconds": delay.seconds}
                    for delay in done.delays
                ],
                "ends": list(done.ends),
            }
        )
    rows.sort(key=lambda row: row["seconds"])
    return {"bytes": nbytes, "bound_seconds": bound, "auto": auto, "schedules": rows}


def _cells(row: dict[str, Any], auto: str) -> list[str]:
    about = "" if row["exact"] else "about "
    ends = row["ends"]
    return [
        row["schedule"],
        about + format_seconds(row["seconds"]),
        format_seconds(row["price_seconds"]),
        f"{row['share_of_bound']:.1%}",
        f"{format_seconds(min(ends))} ({ends.index(min(ends))})",
        f"{format_seconds(max(ends))} ({ends.index(max(ends))})",
        "auto" if row["schedule"] == auto else "",
    ]


def _ends(ends: Sequence[float]) -> str:
    """Return the ends of all ranks, neighbours of equal times together."""
    groups = []
    for text, some in groupby(range(len(ends)), lambda rank: format_seconds(ends[rank])):
        members = list(some)
        groups.append(f"{text} rank{f's {members[0]}-{members[-1]}' if members[1:] else f' {members[0]}'}")
    more = [f"{len(groups) - MAX_GROUPS} more in --json"] if len(groups) > MAX_GROUPS else []
    return ", ".join([*groups[:MAX_GROUPS], *more])
