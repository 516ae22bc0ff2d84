"""`unisono price`: cost of a collective by the closed formula, for each schedule and size."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

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
from unisono.view.words import format_bytes, format_seconds

if TYPE_CHECKING:
    from unisono.plan.collective_costs import CollectiveCase, SchedulePrice

HEAD = ("schedule", "price", "rounds", "sent by a rank", "bound / price", "")


def price(
    ranks: RanksOption,
    collective: CollectiveOption = "allreduce",
    sizes: BytesOption = "4KiB,1MiB,64MiB",
    ranks_per_node: RanksPerNodeOption = 1,
    supernodes: SupernodesOption = None,
    machine: MachineOption = None,
    table: TableOption = None,
    rate: RateOption = None,
    latency: LatencyOption = None,
    oversubscribe: OversubscribeOption = None,
    wire: WireOption = None,
    algorithms: AlgorithmsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Price a collective by the closed formula: seconds, rounds, bytes and share of the bound, for each schedule.

    The formula prices the busiest rank and knows no waits between ranks; `unisono simulate` plays all of them.
    """
    from unisono.plan.collective_costs import choose_auto, price_schedule, schedules_of

    payloads = sizes_of(sizes)
    options = machine, table, rate, latency, oversubscribe, wire
    case = case_of(collective, ranks, ranks_per_node, supernodes, *options)
    schedules, left_out = schedules_of(case, names_of(algorithms))
    by_schedule = [price_schedule(case, name, payloads) for name in schedules]
    found = [
        _size(case, nbytes, choose_auto(case, nbytes), rows)
        for nbytes, *rows in zip(payloads, *by_schedule, strict=True)
    ]
    if as_json:
        print(json.dumps({**as_data(case, left_out), "sizes": found}, indent=1))
        return
    print(describe(case))
    for size in found:
        print(f"\n{title(size['bytes'], size['bound_seconds'], size['auto'])}")
        print_table(HEAD, [_cells(row, size["auto"]) for row in size["schedules"]])
    print()
    print_left_out(left_out)


def _size(case: CollectiveCase, nbytes: int, auto: str, rows: list[SchedulePrice]) -> dict[str, Any]:
    """Return the prices of a size as data, cheapest first."""
    bound = case.bound(nbytes)
    return {
        "bytes": nbytes,
        "bound_seconds": bound,
        "auto": auto,
        "schedules": [
            {**row._asdict(), "share_of_bound": bound / row.seconds}
            for row in sorted(rows, key=lambda row: row.seconds)
        ],
    }


def _cells(row: dict[str, Any], auto: str) -> list[str]:
    return [
        row["schedule"],
        format_seconds(row["seconds"]),
        str(row["rounds"]),
        format_bytes(row["sent_bytes"]),
        f"{row['share_of_bound']:.1%}",
        "auto" if row["schedule"] == auto else "",
    ]
