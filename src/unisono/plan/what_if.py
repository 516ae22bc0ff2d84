"""Machines that are not there yet: one with links twice as fast, or half the latency.

bandwidth=2x    link.bandwidth of the machine file, times 2; so are latency, flops, memory_bandwidth, oversubscription,
disk (disk.bandwidth) and decoding (decoding.pixels)

Rows that were measured change with it: those of products are multiplied with flops, and those of collectives and
messages are left out where links or memory change, so that exchanges are estimated from the link alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from unisono.errors import UsageError
from unisono.plan.machines import MachineFacts

CHANGES: Mapping[str, tuple[str, str]] = {
    "bandwidth": ("link", "bandwidth"),
    "latency": ("link", "latency"),
    "flops": ("node", "flops"),
    "memory_bandwidth": ("node", "memory_bandwidth"),
    "oversubscription": ("topology", "oversubscription"),
    "disk": ("disk", "bandwidth"),
    "decoding": ("decoding", "pixels"),
}
"""Table and key of a machine file by the word that changes it."""

CHANGES_OF_EXCHANGES = ("bandwidth", "latency", "memory_bandwidth", "oversubscription")
"""Changes with which measured exchanges are those of another machine."""


def changed_machine(machine: MachineFacts, words: str) -> MachineFacts:
    """Return the machine with a value multiplied, as in "bandwidth=2x".

    Raises UsageError for other words, and for a value that the machine file does not have.
    """
    name, _, factor = words.partition("=")
    try:
        times = float(factor.removesuffix("x"))
    except ValueError:
        times = 0.0
    if name not in CHANGES or not factor.endswith("x") or not 0 < times < float("inf"):
        raise UsageError(
            f"--what-if {words}: give a factor above 0 for {', '.join(CHANGES)}, as in bandwidth=2x, or a key of the "
            "recipe, as in exchange.wire=bfloat16"
        )
    table, key = CHANGES[name]
    facts: Any = getattr(machine, table)
    if not getattr(facts, key):
        raise UsageError(f"--what-if {words}: {machine.name} has no {table}.{key}, so it cannot be multiplied")
    machine = _without_rows(machine, name, times)
    changed = replace(facts, **{key: getattr(facts, key) * times})
    return replace(machine, name=f"{machine.name}, {words}", **{table: changed})


def _without_rows(machine: MachineFacts, name: str, times: float) -> MachineFacts:
    """Return the machine without the rows that the change makes wrong; FLOP/s of products are multiplied."""
    if name == "flops":
        rows = [replace(row, forward=row.forward * times, backward=row.backward * times) for row in machine.products]
        return replace(machine, products=tuple(rows))
    return replace(machine, collectives=(), messages=()) if name in CHANGES_OF_EXCHANGES else machine
