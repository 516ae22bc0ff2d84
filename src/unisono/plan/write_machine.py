"""Machines written as TOML, such that `parse_machine` reads the same machine again. Unknown values are left out."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import tomli_w

from unisono.plan.machines import REASONS, ROWS, TABLES, MachineFacts


def machine_text(machine: MachineFacts) -> str:
    """Return the file of a machine: its name, its tables, reasons and choices, then its rows."""
    content: dict[str, Any] = {"name": machine.name}
    content |= {name: _known(getattr(machine, name)) for name in TABLES}
    content["slow_links"] = {str(node): factor for node, factor in machine.slow_links.items()}
    content |= {name: dict(getattr(machine, name)) for name in REASONS}
    content["choices"] = machine.choices
    tables = tomli_w.dumps({key: value for key, value in content.items() if value})
    rows = [f"\n[[{name}]]\n{tomli_w.dumps(asdict(row))}" for name in ROWS for row in getattr(machine, f"{name}s")]
    return "".join((tables, *rows))


def _known(table: Any) -> dict[str, Any]:
    """Return the values of a table that differ from their defaults: 0, or what a machine has without a word of it."""
    return {one.name: value for one in fields(table) if (value := getattr(table, one.name)) != one.default}
