"""`unisono lab`: runs a command on a cluster of network namespaces on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unisono.launch import find_mpiexec


def lab(
    command: Annotated[list[str], typer.Argument(help="Command that every rank runs, after '--'.")],
    hosts: Annotated[int, typer.Option(help="Number of hosts per supernode.")],
    rate: Annotated[str, typer.Option(help="Rate of a host's link, each way, in kbit, mbit or gbit: 200mbit.")],
    supernodes: Annotated[int, typer.Option(help="Number of supernodes (switches, joined by a core switch).")] = 1,
    oversubscribe: Annotated[
        float, typer.Option(help="Sum of a switch's host rates, divided by the rate of its uplink.")
    ] = 1.0,
    ranks_per_host: Annotated[int, typer.Option(help="Number of ranks per host.")] = 1,
    slow_hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--slow-host", help="NUMBER:FACTOR, the link of that host is that many times slower. May be repeated."
        ),
    ] = None,
    mpiexec: Annotated[
        Path | None, typer.Option(help="MPI launcher; default: the one of this Python environment.")
    ] = None,
) -> None:
    """Run a command on an emulated cluster: hosts are network namespaces, links are shaped. Needs root."""
    from unisono.lab.cluster import run
    from unisono.lab.plan import Lab, parse_rate, parse_slow_host

    slow = tuple(map(parse_slow_host, slow_hosts or ()))
    cluster = Lab(supernodes, hosts, parse_rate(rate), oversubscribe, ranks_per_host, slow)
    raise typer.Exit(run(cluster, mpiexec or find_mpiexec(), command))
