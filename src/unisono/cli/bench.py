"""`unisono bench`: benchmarks, of Unisono and its peers; `unisono layers`: time of each layer, and its bound."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import tomli_w
from typer import Argument, Option

from unisono.cli.ranks import (
    RanksOption,
    check_ranks,
    join,
    make_folder,
    printer,
    refuse_launcher,
    start_ranks,
    write,
    write_alone,
    write_text,
)
from unisono.errors import UsageError
from unisono.files import naming_os_errors
from unisono.formats import parse_bytes
from unisono.lab.plan import parse_rate
from unisono.launch import keep_memory
from unisono.models import check_name, input_shape
from unisono.view.chart import no_pictures


def collectives(
    output: Annotated[Path, Option(help="Output folder for results.json, table.md and plot.svg.")] = Path("bench"),
    ranks: RanksOption = None,
    largest: Annotated[int, Option(help="Largest payload in bytes.")] = 64 << 20,
    algorithms: Annotated[str | None, Option(help="Algorithms to time, separated by commas; '' for none.")] = None,
    rate: Annotated[str | None, Option(help="Rate of a node's link, for the bound: 200mbit.")] = None,
    against: Annotated[
        str | None,
        Option(help="Compare with other libraries on this machine: mpich,openmpi,intel,gloo, or some of them."),
    ] = None,
    compared: Annotated[
        str | None, Option("--collectives", help="Collectives to compare, separated by commas; default: allreduce.")
    ] = None,
    rounds: Annotated[int | None, Option(help="Rounds of the comparison; default: 3.")] = None,
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
    write(world, output, partial(make_folder, output))  # known before anything is measured
    results = measure(world, [size for size in SIZES if size <= largest], names, bits, log)
    files = {"results.json": json.dumps(results, indent=1), "table.md": table(results)}
    done = write(world, output, partial(_write_report, output, files, "plot.svg", partial(draw, results)))
    log(f"\n{files['table.md']}\n\n{done}")


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
    for name, value in options.items():
        if value is not None:
            raise UsageError(f"{name} {value}: {why}")


def _compare(output: Path, ranks: int, largest: int, against: str, compared: str, rounds: int | None) -> None:
    """Compare collectives with those of other libraries, and write the report."""
    from unisono.bench.against import PEERS, draw, measure_against, summary, table
    from unisono.bench.peer_program import COLLECTIVES, SIZES

    refuse_launcher("--against starts every library's own mpiexec, on one machine: call it without a launcher")
    rounds = 3 if rounds is None else rounds
    if ranks < 2 or rounds < 1:
        raise UsageError(f"--ranks {ranks} --rounds {rounds}: needs 2 ranks and 1 round, or more")
    peers, collectives = _chosen("--against", against, PEERS), _chosen("--collectives", compared, COLLECTIVES)
    make_folder(output)  # known before anything is measured
    log = partial(print, flush=True)
    data = measure_against(peers, ranks, rounds, collectives, [size for size in SIZES if size <= largest], log)
    files = {"results.json": json.dumps(data, indent=1), "table.md": "\n".join([table(data), "", *summary(data)])}
    log(f"\n{files['table.md']}\n\n{_write_report(output, files, 'plot.svg', partial(draw, data))}")


def _chosen(option: str, given: str, known: Sequence[str]) -> list[str]:
    """Return the names of a list with commas, each once. Raises UsageError for an unknown one, or for none."""
    names = list(dict.fromkeys(name for name in given.split(",") if name))
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"{option} {given}: unknown: {', '.join(unknown)}; there are {', '.join(known)}")
    if not names:
        raise UsageError(f"{option} is empty; there are {', '.join(known)}")
    return names


def _write_report(output: Path, files: Mapping[str, str], picture: str = "", draw: Callable[[], bytes] = bytes) -> str:
    """Write files of text into a folder, and a picture where matplotlib is installed. Return a line about them.

    Raises UsageError where that fails.
    """
    names, missing = list(files), no_pictures() if picture else ""
    with naming_os_errors(f"cannot write {output}"):
        for name, content in files.items():
            (output / name).write_text(content + "\n")
        if picture and not missing:
            (output / picture).write_bytes(draw())
            names.append(picture)
    return f"wrote {output}/{' and '.join(names)}{f'; {missing}' if missing else ''}"


def networks(
    output: Annotated[Path, Option(help="Output folder for networks.json and networks.md.")] = Path("bench"),
    names: Annotated[str, Option(help="Networks, separated by commas.")] = "alexnet,vgg16,vgg19,resnet50,googlenet",
    batch: Annotated[int, Option(help="Batch size.")] = 32,
    steps: Annotated[int, Option(help="Timed steps of each contender.")] = 3,
) -> None:
    """Time training steps of the papers' networks: images/s of Unisono and of stock PyTorch."""
    if batch < 1 or steps < 1:
        raise UsageError(f"--batch {batch} --steps {steps}: both must be at least 1")
    chosen = [name for name in names.split(",") if name]
    if not chosen:
        raise UsageError("--names is empty; name networks, such as resnet50")
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
        timings = measure_networks(chosen, batch, steps, plan, status.update)
    setup = {"processor": processor().name, "threads": torch.get_num_threads(), "torch": torch.__version__}
    table = as_markdown(timings)
    results = {**setup, "networks": timings, "plan": plan.measured}
    files = {"networks.json": json.dumps(results, indent=1), "networks.md": table}
    about = ", ".join(f"{key} {value}" for key, value in setup.items())
    print(f"images/s; {about}\n\n{table}\n\n{_write_report(output, files)}")


def shuffle(
    output: Annotated[Path, Option(help="Output folder, which all ranks read, for shuffle.json.")] = Path("bench"),
    ranks: RanksOption = None,
    nbytes: Annotated[str, Option("--bytes", help="Bytes of all samples: 20MB.")] = "20MB",
    groups: Annotated[int, Option(help="Groups of ranks that hold a copy each.")] = 1,
    rate: Annotated[str | None, Option(help="Rate of a node's link, for the share of it: 200mbit.")] = None,
) -> None:
    """Time the shuffle of samples over ranks, in memory: seconds of the slowest rank, and what each rank holds."""
    size, bits = parse_bytes(nbytes), parse_rate(rate) if rate else None
    from unisono.data.pack import check_installed

    check_installed()
    start_ranks(ranks)
    from unisono.bench.shuffle import LENGTH, measure_shuffle, random_pack

    world = join("bench shuffle")
    with world.agree_on_errors():
        if groups < 1 or world.size % groups or world.size == groups:
            raise UsageError(f"--groups {groups}: {world.size} ranks do not form so many groups of two ranks or more")
    write(world, output, lambda: random_pack(output / "pack", max(world.size, size // LENGTH)))
    rows = measure_shuffle(world, output / "pack", groups, bits)
    write_text(world, output / "shuffle.json", json.dumps(rows, indent=1))
    _print_samples(rows, printer(world))


def messages(
    output: Annotated[Path, Option(help="Output folder for messages.json.")] = Path("bench"), ranks: RanksOption = None
) -> None:
    """Time messages between two ranks by size, through the MPI library: milliseconds, and bytes per second."""
    start_ranks(ranks)
    from unisono.bench.collectives import measure_messages

    world = join("bench messages")
    write(world, output, partial(make_folder, output))
    rows = measure_messages(world)
    write_text(world, output / "messages.json", json.dumps(rows, indent=1))
    _print_samples(rows, printer(world))


STARTS_RANKS = "unisono bench {} starts the ranks of each run itself; start it without mpiexec or srun"


def storage(
    output: Annotated[Path, Option(help="Output folder for the images, the runs and storage.json.")] = Path("bench"),
    ranks: RanksOption = 2,
    images: Annotated[int, Option(min=8, help="Training images, written as JPEG files.")] = 8000,
    side: Annotated[int, Option(min=8, help="Width and height of these files in pixels.")] = 32,
    epochs: Annotated[int, Option(min=1, help="Epochs of each run; the first does not count.")] = 4,
) -> None:
    """Train on the same images in memory, from the stripes of a pack, and from their files: seconds an epoch."""
    refuse_launcher(STARTS_RANKS.format("storage"))
    check_ranks(ranks)
    from unisono.data.pack import check_installed

    check_installed()
    from unisono.bench.ablation import storages, write_images

    make_folder(output)
    images_at = write_alone(output, partial(write_images, output, images, side))
    same = f"data.size=8 data.augment=shift compute.convolutions=library rule.overlap=none training.epochs={epochs}"
    sets = [word for change in same.split() for word in ("--set", change)]
    _make_variants(["unisono", "train", "digits", f"--ranks={ranks}", *sets], storages(images_at), output, "storage")


def ablation(
    recipe: Annotated[Path, Argument(help="Recipe: a TOML file, or a name such as digits.")],
    output: Annotated[Path, Option(help="Output folder for the runs, ablation.json and ablation.md.")] = Path("bench"),
    ranks: RanksOption = None,
    changes: Annotated[
        list[str] | None, Option("--set", help="Value of a key of the recipe in all runs. May be repeated.")
    ] = None,
    hosts: Annotated[
        int, Option(min=0, help="Hosts of an emulated cluster (unisono lab, needs root) with a rank each.")
    ] = 0,
    rate: Annotated[str, Option(help="Rate of each host's link: 200mbit.")] = "1gbit",
) -> None:
    """Train with everything off, then switch one thing after another on: seconds an epoch, accuracy, what it gained.

    These are the schedule, overlap, wire, memory (packs alone) and convolutions, each as the recipe has it. What has
    run into the output folder is not repeated.
    """
    from unisono.bench.ablation import ladder
    from unisono.training.recipe import find_recipe, read_recipe, to_dict

    refuse_launcher(STARTS_RANKS.format("ablation"))
    check_ranks(ranks)
    parse_rate(rate)
    if hosts and ranks:
        raise UsageError(f"--ranks {ranks}: not with --hosts {hosts}, which have a rank each")
    settings = read_recipe(find_recipe(recipe), changes or [])
    make_folder(output)
    contents = tomli_w.dumps(to_dict(settings)).encode()
    path = output / f"recipe-{hashlib.sha256(contents).hexdigest()[:12]}.toml"  # runs of another recipe are not these
    write_alone(path, partial(path.write_bytes, contents))
    lab = ["unisono", "lab", f"--hosts={hosts}", f"--rate={rate}", "--"] if hosts else []
    ranks_option = [f"--ranks={ranks}"] if ranks else []
    _make_variants([*lab, "unisono", "train", str(path.resolve()), *ranks_option], ladder(settings), output, "ablation")


def _make_variants(train: Sequence[str], variants: Mapping[str, Mapping[str, str]], output: Path, name: str) -> None:
    """Make the runs of a recipe, write what they measured, and print it."""
    from unisono.bench.ablation import as_data, run_variants, table

    results = write_alone(output, lambda: run_variants(train, variants, output, partial(print, flush=True)))
    files = {f"{name}.json": as_data(results), f"{name}.md": table(results)}
    print(f"\n{table(results)}\n\n{_write_report(output, files)}", flush=True)


def memory(output: Annotated[Path, Option(help="Output folder for memory.json.")] = Path("bench")) -> None:
    """Time reads, writes and copies in memory, by size and by the size of blocks, on all cores: bytes per second."""
    make_folder(output)
    from unisono.bench.layers import measure_memory

    rows = measure_memory()
    _write_report(output, {"memory.json": json.dumps(rows, indent=1)})
    _print_samples(rows, print)


def _print_samples(rows: Sequence[Mapping[str, Any]], log: Callable[[str], None]) -> None:
    """Print a line for each row of named samples: the median, and the range."""
    for row in rows:
        samples = sorted(row["samples"])
        log(f"{row['name']:32}{median(samples):10.3g} {row['unit']:6}{samples[0]:10.3g} to {samples[-1]:.3g}")


PLAIN_WIDTH = 140
"""Columns of the table when the output is not a terminal."""


def layers(
    model: Annotated[str, Option(help="Name of a network, as in a recipe, or module:function.")] = "resnet50",
    batch: Annotated[int, Option(help="Batch size.")] = 32,
    size: Annotated[int, Option(help="Width and height of the images in pixels; 0: as in the network's paper.")] = 0,
    classes: Annotated[int, Option(help="Number of classes.")] = 1000,
    output: Annotated[
        Path | None, Option(help="Output folder for layers.json, and layers.svg if matplotlib is installed.")
    ] = None,
    plan: Annotated[Path | None, Option(help="File of a convolution plan, read and extended.")] = None,
    precision: Annotated[
        str, Option(help="float32, bfloat16, or auto: bfloat16 if the processor supports it.")
    ] = "auto",
) -> None:
    """Time each layer's three passes, each by its fastest algorithm, and compare them with measured bounds."""
    if batch < 1 or classes < 1:
        raise UsageError(f"--batch {batch} --classes {classes}: both must be at least 1")
    check_name(model)
    if output is not None:
        make_folder(output)
    keep_memory()
    import torch
    from rich.console import Console

    from unisono.bench.layers import as_data, as_table, draw, layers_of, measure_layers, measure_peak, summary
    from unisono.compute.convolution_plan import ConvolutionPlan, check_plan, machine, read_plan, write_plan
    from unisono.compute.prepare import choose_dtype
    from unisono.compute.response_norm import use_response_norms
    from unisono.models import make_network
    from unisono.processor import processor

    here, dtype = machine(processor().name), choose_dtype(precision, torch.float32, torch.device("cpu"))
    if plan is not None:
        check_plan(plan)
    shape = (batch, *input_shape(model, size))
    width = None if sys.stdout.isatty() else PLAIN_WIDTH
    console = Console(markup=False, highlight=False, soft_wrap=True, width=width)
    timings = ConvolutionPlan({} if plan is None else read_plan(plan, here))
    network = make_network(model, "", classes, shape[1])
    use_response_norms(network)
    network_layers = layers_of(network, shape)
    peak = measure_peak(dtype)
    with console.status("") as status:
        rows = measure_layers(network_layers, timings, dtype, status.update)
    if plan is not None:
        write_plan(plan, here, timings.measured)
    setup = {"model": model, "inputs": shape, "dtype": str(dtype).removeprefix("torch.")}
    setup |= {name: here[name] for name in ("threads", "processor")}
    console.print(as_table(rows, peak))
    console.print("\n".join(summary(rows, peak, setup)))
    if output is not None:
        files = {"layers.json": json.dumps(as_data(rows, peak, setup), indent=1)}
        picture = partial(draw, rows, peak, f"{model}, batch {batch}, {setup['dtype']}")
        console.print(_write_report(output, files, "layers.svg", picture))
