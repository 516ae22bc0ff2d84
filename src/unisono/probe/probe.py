"""Probe of the machine that the ranks of a world run on: its plan, played; its findings, as a machine file.

plan_probe ─▶ parts ── play ──▶ seconds of calls ── machine_facts ──▶ MachineFacts ─▶ OUT.toml
pure                   acts                         pure
"""

from __future__ import annotations

import datetime
import socket
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from unisono.launch import available_cores
from unisono.plan.machines import MachineFacts, machine_text
from unisono.probe.facts import ProbedSite, machine_facts
from unisono.probe.plan import plan_probe
from unisono.probe.player import play
from unisono.probe.system import read_system
from unisono.world import World


def probe(world: World, seconds: float, disk: Path | None, name: str, log: Callable[[str], None]) -> MachineFacts:
    """Measure the machine in about `seconds`. Called by all ranks, with the same result on each.

    `disk` is a folder of the file system to read from, on every node. An empty `name` becomes the hosts and ranks.
    """
    plan = plan_probe(seconds, world.nodes, world.size, disk is not None)
    findings = play(world, plan, disk, log)
    site = ProbedSite(socket.gethostname(), available_cores(), read_system())
    sites = world.all_gather_object(site)
    called = name or f"{sites[0].host}, nodes: {world.nodes}, ranks: {world.size}"
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    facts = machine_facts(called, findings, sites, world.placement, today, version("unisono"))
    return world.call_on_root(lambda: facts)


def file_of(machine: MachineFacts) -> str:
    """Return the text of the machine file that a probe writes."""
    found = machine.probe
    head = f"# Written by `unisono probe`, Unisono {found.version}, on {found.date}; ranks: {found.ranks}, "
    head += (
        f"nodes: {found.nodes}, {found.seconds:.0f} s.\n# [measured] says how each value was found; values that are "
    )
    head += "not known are left out. docs/planning.md describes the rows.\n"
    return f"{head}\n{machine_text(machine)}"
