"""`unisono lab`: runs a command on a cluster of network namespaces on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unisono.launch import find_mpiexec


def lab(
    command: Annotated[list[str], typer.Argument(help="What every rank runs, after two dashes.")],
    hosts: Annotated[int, typer.Option(help="How many hosts each supernode has.")],
    rate: Annotated[str, typer.Option(help="What a link carries each way: 200mbit, in kbit, mbit or gbit.")],
    supernodes: Annotated[int, typer.Option(help="How many supernodes: switches, joined by a core switch.")] = 1,
    oversubscribe: Annotated[
        float, typer.Option(help="An uplink carries the rates of its hosts together, divided by this.")
    ] = 1.0,
    ranks_per_host: Annotated[int, typer.Option(help="How many ranks each host runs.")] = 1,
    mpiexec: Annotated[Path | None, typer.Option(help="The launcher; else the one beside this Python.")] = None,
) -> None:
    """Run a command on a simulated cluster: hosts are network namespaces, links are shaped. Needs root."""
    from unisono.lab.cluster import run
    from unisono.lab.plan import Lab, parse_rate

    cluster = Lab(supernodes, hosts, parse_rate(rate), oversubscribe, ranks_per_host)
    raise typer.Exit(run(cluster, mpiexec or find_mpiexec(), command))
