"""`unisono bench`: benchmarks of Unisono and its peers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from unisono.cli.command_group import CommandGroup
from unisono.cli.ranks import RanksOption, join, make_folder, printer, start_ranks, write, write_alone
from unisono.errors import UsageError
from unisono.lab.plan import parse_rate
from unisono.launch import rank_started, ranks_started
from unisono.view.chart import no_pictures

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, help="Benchmarks of Unisono and its peers.")


@app.command()
def collectives(
    output: Annotated[Path, typer.Option(help="Output folder for results.json, table.md and plot.svg.")] = Path(
        "bench"
    ),
    ranks: RanksOption = None,
    largest: Annotated[int, typer.Option(help="Largest payload in bytes.")] = 64 << 20,
    algorithms: Annotated[
        str | None, typer.Option(help="Algorithms to time, separated by commas; '' for none.")
    ] = None,
    rate: Annotated[str | None, typer.Option(help="Rate of a node's link, for the bound: 200mbit.")] = None,
    against: Annotated[
        str | None,
        typer.Option(help="Compare with other libraries on this machine: mpich,openmpi,intel,gloo, or some of them."),
    ] = None,
    compared: Annotated[
        str | None,
        typer.Option("--collectives", help="Collectives to compare, separated by commas; default: allreduce."),
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of the comparison; default: 3.")] = None,
) -> None:
    """Time the allreduce: every algorithm, the MPI library, gloo and the bound, in one run.

    With --against, compare collectives with those of other libraries, by turns. Each MPI is installed at its first use,
    in an environment of its own in the user's cache, and started by its own mpiexec.
    """
    if largest < 4:
        raise UsageError(f"--largest {largest}: nothing to time below 4 bytes")
    if against is not None:
        _refuse({"--algorithms": algorithms, "--rate": rate}, "not with --against, which times `auto` on one machine")
        _compare(output, 2 if ranks is None else ranks, largest, against, compared or "allreduce", rounds)
        return
    _refuse({"--collectives": compared, "--rounds": rounds}, "only with --against")
    names = None if algorithms is None else [name for name in algorithms.split(",") if name]
    _check_algorithms(names or [])
    bits = parse_rate(rate) if rate else None
    start_ranks(ranks)
    from unisono.bench.collectives import draw, measure, table
    from unisono.bench.peer_program import SIZES

    world = join("bench collectives")
    log = printer(world)
    write(world, output, lambda: output.mkdir(parents=True, exist_ok=True))  # known before anything is measured

    found = measure(world, [size for size in SIZES if size <= largest], names, bits, log)
    _write_report(output, found, table(found), draw, partial(write, world, output), log)


def _check_algorithms(names: Sequence[str]) -> None:
    """Raise UsageError for an unknown schedule or wire."""
    from unisono.schedules import check
    from unisono.wires import WIRES

    for name in names:
        schedule, _, wire = name.partition(" ")
        if schedule not in ("auto", "library"):
            check(schedule)
        if wire and wire not in WIRES:
            raise UsageError(f"--algorithms {name}: there is no wire {wire!r}; there are {', '.join(WIRES)}")


def _refuse(options: Mapping[str, object], why: str) -> None:
    """Raise UsageError for an option that was given."""
    for name, value in options.items():
        if value is not None:
            raise UsageError(f"{name} {value}: {why}")


def _compare(output: Path, ranks: int, largest: int, against: str, compared: str, rounds: int | None) -> None:
    """Compare collectives with those of other libraries, and write the report."""
    from unisono.bench.against import PEERS, draw, measure_against, summary, table
    from unisono.bench.peer_program import COLLECTIVES, SIZES

    if ranks_started(os.environ) is not None:
        if rank_started(os.environ):
            raise SystemExit(2)  # rank 0 reports it
        raise UsageError("--against starts every library's own mpiexec, on one machine: call it without a launcher")
    rounds = 3 if rounds is None else rounds
    if ranks < 2 or rounds < 1:
        raise UsageError(f"--ranks {ranks} --rounds {rounds}: needs 2 ranks and 1 round, or more")
    peers = _chosen("--against", against, PEERS)
    collectives = _chosen("--collectives", compared, COLLECTIVES)
    make_folder(output)  # known before anything is measured
    log = partial(print, flush=True)
    found = measure_against(peers, ranks, rounds, collectives, [size for size in SIZES if size <= largest], log)
    text = "\n".join([table(found), "", *summary(found)])
    _write_report(output, found, text, draw, partial(write_alone, output), log)


def _chosen(option: str, given: str, known: Sequence[str]) -> list[str]:
    """Return the names of a list with commas, each once. Raises UsageError for an unknown one, or for none."""
    names = list(dict.fromkeys(name for name in given.split(",") if name))
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"{option} {given}: unknown: {', '.join(unknown)}; there are {', '.join(known)}")
    if not names:
        raise UsageError(f"{option} is empty; there are {', '.join(known)}")
    return names


def _write_report(
    output: Path,
    found: Mapping[str, Any],
    text: str,
    draw: Callable[[Mapping[str, Any]], bytes],
    write_output: Callable[[Callable[[], object]], None],
    log: Callable[[str], None],
) -> None:
    """Write results.json, table.md with `text`, and plot.svg where matplotlib is installed; show the text."""
    for name, content in {"results.json": json.dumps(found, indent=1), "table.md": text}.items():
        write_output(partial((output / name).write_text, content + "\n"))
    if not (missing := no_pictures()):
        write_output(lambda: (output / "plot.svg").write_bytes(draw(found)))
    log(f"\n{text}\n\nwrote {output}/results.json and table.md{f'; {missing}' if missing else ' and plot.svg'}")


@app.command()
def networks(
    output: Annotated[Path, typer.Option(help="Output folder for networks.json and networks.md.")] = Path("bench"),
    names: Annotated[
        str, typer.Option(help="Networks, separated by commas.")
    ] = "alexnet,vgg16,vgg19,resnet50,googlenet",
    batch: Annotated[int, typer.Option(help="Batch size.")] = 32,
    steps: Annotated[int, typer.Option(help="Timed steps of each contender.")] = 3,
) -> None:
    """Time training steps of the papers' networks: images/s of Unisono and of stock PyTorch."""
    from unisono.models import check_name

    if batch < 1 or steps < 1:
        raise UsageError(f"--batch {batch} --steps {steps}: both must be at least 1")
    chosen = [name for name in names.split(",") if name]
    for name in chosen:
        check_name(name)
    make_folder(output)
    import torch
    from rich.console import Console

    from unisono.bench.networks import as_markdown, measure_networks
    from unisono.compute.convolution_plan import ConvolutionPlan
    from unisono.processor import processor

    console, plan = Console(stderr=True), ConvolutionPlan()
    with console.status("") as status:
        found = measure_networks(chosen, batch, steps, plan, status.update)
    about = {"processor": processor().name, "threads": torch.get_num_threads(), "torch": torch.__version__}
    table = as_markdown(found)
    whole = {**about, "networks": found, "plan": plan.measured}
    (output / "networks.json").write_text(json.dumps(whole, indent=1) + "\n")
    (output / "networks.md").write_text(table + "\n")
    print(f"images/s; {', '.join(f'{key} {value}' for key, value in about.items())}\n\n{table}\n")
    print(f"wrote {output}/networks.json and networks.md")
