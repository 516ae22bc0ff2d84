"""`unisono probe` and `unisono tune`: measure the machine that they run on, and write its file for plans and `auto`."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from unisono.cli.ranks import RanksOption, join, printer, start_ranks, write, write_text
from unisono.errors import UsageError
from unisono.files import check_writable
from unisono.launch import find_mpiexec, local_rank_started
from unisono.processor import HOST

MIN_SECONDS = 5.0
"""Least seconds of a probe: less has no time for the larger products."""


def probe(
    output: Annotated[Path, Argument(help="Output file for the machine, OUT.toml.")],
    seconds: Annotated[float, Option(help="Seconds that all measurements may take.")] = 60.0,
    disk: Annotated[Path | None, Option(help="Folder, on every node, whose file system is read from.")] = None,
    name: Annotated[str, Option(help="Name of the machine; default: its host, nodes and ranks.")] = "",
    device: Annotated[str, Option(help="Device of each rank, as compute.device of a recipe.")] = HOST,
    ranks: RanksOption = None,
) -> None:
    """Measure products, memory, links, collectives, disk and decoding, and write them as a machine file.

    Start it as you will start your program: mpiexec -n 4 -ppn 1 -hosts a,b,c,d unisono probe ours.toml. Then plan runs
    on it, on these and on more nodes: unisono plan --machine ./ours.toml --nodes 4,8,16. With --device, products are
    those of the accelerators, and copies between them and the host are measured too.
    """
    if output.suffix != ".toml":
        raise UsageError(f"{output}: a machine file ends in .toml")
    if not MIN_SECONDS <= seconds < float("inf"):
        raise UsageError(f"--seconds {seconds:g}: a probe needs {MIN_SECONDS:g} seconds or more")
    start_ranks(ranks)
    from unisono.data.loading import device_of_rank
    from unisono.device import open_device
    from unisono.measure.facts import file_of
    from unisono.measure.player import machine_at
    from unisono.measure.player import probe as measure
    from unisono.transports.barriers import is_compiled

    def check_folder() -> None:
        if disk is not None and not disk.is_dir():
            raise UsageError(f"--disk {disk}: there is no such folder")

    open_device(device, local_rank_started(os.environ))
    world = join("probe", alone=True)
    log = printer(world)
    with world.agree_on_errors():
        place = device_of_rank(device, world)
        world.call_on_all(check_folder)
        world.call_on_root(lambda: machine_at(output))  # what it would replace
    write(world, output, partial(check_writable, output))  # known before anything is measured

    facts = measure(world, seconds, disk, name, log, place)
    if world.nodes == 1:
        readable = world.reads_other_processes()
        log(f"memory of the node's other processes: {'readable' if readable else 'not readable'}")
        log(f"short collectives of the node: played by {'compiled code' if is_compiled() else 'Python'}")
    write_text(world, output, file_of(facts))
    log(f"wrote {output} after {facts.probe.seconds:.1f} s; use it with unisono plan --machine {output}")


def tune(
    output: Annotated[Path, Option(help="Output file, a machine.")] = Path("unisono-table.toml"),
    ranks: RanksOption = None,
    largest: Annotated[int, Option(help="Largest payload to time, in bytes.")] = 256 << 20,
) -> None:
    """Measure the links, time the schedules, and write a machine file with the table by which "auto" chooses.

    Start it as you will start your program: mpiexec -n 8 -ppn 1 -hosts a,b,... unisono tune. Then name the file in
    UNISONO_TABLE, or in unisono.init(table=...). Given a file of `unisono probe`, it adds the table and keeps the rest.
    """
    if largest < 4:
        raise UsageError(f"--largest {largest}: nothing to time below 4 bytes")
    start_ranks(ranks)
    from unisono.measure.facts import file_of
    from unisono.measure.player import machine_at
    from unisono.measure.player import tune as measure

    world = join("tune")
    write(world, output, partial(check_writable, output))  # known before anything is measured
    with world.agree_on_errors():
        before = world.call_on_root(lambda: machine_at(output))
    log = printer(world)
    facts = measure(world, largest, log, before)
    write_text(world, output, file_of(facts))
    log(f"wrote {output}; use it with UNISONO_TABLE={output.resolve()} or unisono.init(table=...)")


def lab(
    command: Annotated[list[str], Argument(help="Command that every rank runs, after '--'.")],
    hosts: Annotated[int, Option(help="Number of hosts per supernode.")],
    rate: Annotated[str, Option(help="Rate of a host's link, each way, in kbit, mbit or gbit: 200mbit.")],
    supernodes: Annotated[int, Option(help="Number of supernodes (switches, joined by a core switch).")] = 1,
    oversubscribe: Annotated[
        float, Option(help="Sum of a switch's host rates, divided by the rate of its uplink.")
    ] = 1.0,
    ranks_per_host: Annotated[int, Option(help="Number of ranks per host.")] = 1,
    slow_hosts: Annotated[
        list[str] | None,
        Option("--slow-host", help="NUMBER:FACTOR, the link of that host is that many times slower. May be repeated."),
    ] = None,
    mpiexec: Annotated[Path | None, Option(help="MPI launcher; default: the one of this Python environment.")] = None,
) -> None:
    """Run a command on an emulated cluster: hosts are network namespaces, links are shaped. Needs root."""
    from unisono.lab.cluster import run
    from unisono.lab.plan import Lab, parse_rate, parse_slow_host

    slow = tuple(map(parse_slow_host, slow_hosts or ()))
    cluster = Lab(supernodes, hosts, parse_rate(rate), oversubscribe, ranks_per_host, slow)
    raise Exit(run(cluster, mpiexec or find_mpiexec(), command))
