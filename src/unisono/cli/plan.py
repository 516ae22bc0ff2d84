"""`unisono plan`: a run planned before it starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unisono.cli.garbage import paused_collection
from unisono.cli.plan_words import factors_of, node_counts, sample_shape
from unisono.cli.units import check_most
from unisono.errors import UsageError

if TYPE_CHECKING:
    from unisono.training.prediction import RunPrediction

MAX_NUMBER = 10**12
"""Largest number of samples, epochs and the like: numbers that a plan only multiplies."""


@paused_collection()
def plan(
    recipe: Annotated[
        Path | None,
        typer.Argument(
            help="Recipe, a TOML file or a name such as digits: its network, batch, rule, exchange, optimizer and data."
        ),
    ] = None,
    machine: Annotated[str | None, typer.Option(help="Name of a machine, or its TOML file.")] = None,
    nodes: Annotated[str, typer.Option(help="Numbers of nodes: 1,2,4, or 1,2,4,...,1024 with the same factor.")] = "1",
    model: Annotated[str | None, typer.Option(help="Name of a network, or module:function.")] = None,
    recipe_option: Annotated[
        Path | None, typer.Option("--recipe", help="The same as the argument: plan --recipe digits.")
    ] = None,
    minibatch: Annotated[int | None, typer.Option(help="Samples of a step, over all ranks.")] = None,
    inputs: Annotated[
        str | None, typer.Option("--input", help="Shape of a sample, as 3x224x224; default: as in the network's paper.")
    ] = None,
    classes: Annotated[
        int | None, typer.Option(help="Number of classes; default: those of the recipe's data, or 1,000.")
    ] = None,
    optimizer: Annotated[str | None, typer.Option(help="Name of the optimizer; default: sgd with momentum.")] = None,
    ranks_per_node: Annotated[int, typer.Option(help="Ranks of a node, which share its computing.")] = 1,
    rule: Annotated[str | None, typer.Option(help="Rules: bsp,sharded,local_sgd:16; default: bsp.")] = None,
    wire: Annotated[str | None, typer.Option(help="Number format between nodes, such as bfloat16.")] = None,
    sample_bytes: Annotated[int | None, typer.Option(help="Bytes of an encoded sample.")] = None,
    sample_pixels: Annotated[int | None, typer.Option(help="Pixels that are decoded of a sample.")] = None,
    from_disk: Annotated[
        bool, typer.Option("--from-disk", help="Each step reads its samples from disk, not from memory.")
    ] = False,
    epoch_samples: Annotated[int | None, typer.Option(help="Samples of an epoch.")] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Epochs of the run, for --time; default: the recipe's, or 1.")
    ] = None,
    test_samples: Annotated[
        int | None, typer.Option(help="Samples of the test after each epoch, for --time; default: the recipe's, or 0.")
    ] = None,
    start_seconds: Annotated[
        float | None, typer.Option(help="Seconds until the first step, for --time; default: 20.")
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            help="Change, shown beside the plan without it: bandwidth=2x, wire=bfloat16, rule=local_sgd:16; several "
            "together with commas. May be repeated."
        ),
    ] = None,
    slow_link: Annotated[
        list[str] | None, typer.Option(help="NODE:FACTOR, its link is that many times slower. May be repeated.")
    ] = None,
    slow_node: Annotated[
        list[str] | None,
        typer.Option(help="NODE:FACTOR, its computing takes that many times as long. May be repeated."),
    ] = None,
    simulated: Annotated[
        bool,
        typer.Option("--simulate", help="Simulate the collectives of each bucket size instead of estimating them."),
    ] = False,
    worthwhile: Annotated[
        float, typer.Option(help="Speedup that each further node must add for more nodes to pay.")
    ] = 0.5,
    layers: Annotated[
        bool, typer.Option("--layers", help="Print a table of the layers for each number of nodes.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    time: Annotated[bool, typer.Option("--time", help="Print nothing but the wall time, for sbatch --time.")] = False,
    chart: Annotated[Path | None, typer.Option(help="Output file for a chart of the speedup, SVG.")] = None,
    check: Annotated[
        Path | None, typer.Option(help="Folder of a run that has ended: its prediction beside what was measured.")
    ] = None,
) -> None:
    """Predict the step, speedup, memory and bottleneck of a run on each number of nodes, before it starts."""
    if recipe is not None and recipe_option is not None:
        raise UsageError(f"{recipe} and --recipe {recipe_option}: give one recipe")
    recipe = recipe or recipe_option
    if check is not None:
        _check(check, as_json, machine or model or recipe)
        return
    if machine is None:
        from unisono.plan.machines import machine_names

        known = ", ".join(machine_names())
        raise UsageError(f"--machine is missing: there are {known}, or give a TOML file, such as ./mine.toml")
    if (model is None) == (recipe is None):
        raise UsageError("give a recipe or --model NAME, one of them: unisono plan digits --machine NAME")
    for option, number in (
        ("minibatch", minibatch),
        ("ranks-per-node", ranks_per_node),
        ("epochs", epochs),
        ("classes", classes),
        ("epoch-samples", epoch_samples),
        ("sample-bytes", sample_bytes),
        ("sample-pixels", sample_pixels),
    ):
        if number is not None and number < 1:
            raise UsageError(f"--{option} {number}: it is 1 at least")
        check_most(option, number or 1, MAX_NUMBER)
    for option, least in (("test-samples", test_samples), ("start-seconds", start_seconds)):
        if least is not None and not 0 <= least <= MAX_NUMBER:
            raise UsageError(f"--{option} {least}: it is 0 at least, and {MAX_NUMBER:,} at most")
    from unisono.bench.contender import shape_of
    from unisono.plan.layer_costs import at_rate_of
    from unisono.plan.machines import find_machine
    from unisono.plan.unequal import with_slow_links
    from unisono.training.planned_run import (
        CLASSES,
        TRACED_SAMPLES,
        changed,
        example_of,
        network_of,
        planned_run,
        with_rules,
    )
    from unisono.training.prediction import predict_rows, traced_network

    counts, shape = node_counts(nodes), sample_shape(inputs)
    found = with_slow_links(find_machine(machine), factors_of("--slow-link", slow_link or (), counts[-1]))
    slow_nodes = factors_of("--slow-node", slow_node or (), counts[-1])
    run = with_rules(planned_run(recipe, model, minibatch), rule, wire)
    data, facts, job = run.data, run.data.samples, run.job
    facts = facts._replace(
        nbytes=sample_bytes or facts.nbytes, pixels=sample_pixels or facts.pixels, from_disk=from_disk
    )
    data = data._replace(samples=facts, train=epoch_samples or data.train)
    job = job._replace(
        epochs=epochs or job.epochs,
        test_samples=job.test_samples if test_samples is None else test_samples,
        start=job.start if start_seconds is None else start_seconds,
    )
    run = replace(run, optimizer=optimizer or run.optimizer, data=data, job=job)
    run = replace(run, slow_nodes=slow_nodes, simulated=simulated)
    own = shape_of(run.name, 1)[1:]
    shape = shape or data.shape or shape_of(run.name, 1, run.size)[1:]
    network = network_of(run, shape, classes or data.classes or CLASSES)
    traced = traced_network(network, example_of(network, shape, TRACED_SAMPLES))
    measured = run.name if shape == own else ""
    found = at_rate_of(found, measured, traced.trace.layers, TRACED_SAMPLES, run.minibatch / counts[-1])
    before = predict_rows(run, found, traced, counts, ranks_per_node)
    after = {
        words: predict_rows(*changed(run, found, words), traced, counts, ranks_per_node) for words in what_if or ()
    }
    if chart is not None:
        _draw(before, after, chart)
    if time:
        _print_time(before, as_json)
    elif as_json:
        _print_json(before, after, worthwhile, layers)
    else:
        _print_lines(before, after, worthwhile, layers)


def _print_lines(before: RunPrediction, after: Mapping[str, RunPrediction], least: float, layers: bool) -> None:
    """Print the plan as a table, what the changes make of it, and its layers."""
    from unisono.plan.layer_table import layer_lines
    from unisono.plan.run_comparison import compare, comparison_lines
    from unisono.plan.run_report import as_lines
    from unisono.training.prediction import layers_on, notes_of

    run, machine = before.run, before.machine
    print(f"{run.name}, {run.minibatch} samples a step, on {machine.name}\n")
    print("\n".join(as_lines(before.rows, machine, least, notes_of(before))))
    changes = [row for words, found in after.items() for row in compare(before.rows, found.rows, words)]
    if changes:
        print("\n" + "\n".join(comparison_lines(changes)))
    for nodes in before.settings.nodes if layers else ():
        print(f"\nlayers on {nodes} node{'s' * (nodes > 1)}\n")
        print("\n".join(layer_lines(layers_on(before, nodes))))


def _print_json(before: RunPrediction, after: Mapping[str, RunPrediction], least: float, layers: bool) -> None:
    """Print the plan as data, with what the changes make of it."""
    from unisono.plan.run_comparison import compare, comparison_data
    from unisono.plan.run_report import as_data
    from unisono.training.prediction import layers_on, notes_of

    data = as_data(before.rows, before.machine, least) | {"notes": notes_of(before)}
    if after:
        data["what_if"] = [
            {
                "change": words,
                "rows": comparison_data(compare(before.rows, found.rows, words)),
                "plan": as_data(found.rows, found.machine, least),
            }
            for words, found in after.items()
        ]
    if layers:
        data["layers"] = {nodes: [one._asdict() for one in layers_on(before, nodes)] for nodes in before.settings.nodes}
    print(json.dumps(data, indent=1))


def _print_time(found: RunPrediction, as_json: bool) -> None:
    """Print the wall time of the job, or its parts as data."""
    from unisono.plan.wall_time import slurm_time
    from unisono.training.prediction import job_of

    seconds = job_of(found)
    if as_json:
        print(json.dumps({**seconds._asdict(), "total": seconds.total, "time": slurm_time(seconds.total)}, indent=1))
    else:
        print(slurm_time(seconds.total))


def _draw(before: RunPrediction, after: Mapping[str, RunPrediction], path: Path) -> None:
    """Write a chart of the plan, and of what the changes make of it."""
    from unisono.plan.run_chart import draw_chart
    from unisono.plan.run_comparison import changed_rules

    others = [row for words, found in after.items() for row in changed_rules(before.rows, found.rows, words)]
    title = f"{before.run.name}, {before.run.minibatch} samples a step"
    draw_chart([*before.rows, *others], title, before.machine.name, path)


def _check(run: Path, as_json: bool, other: str | Path | None) -> None:
    """Print the prediction of a run beside its measurement, part by part."""
    if other is not None:
        raise UsageError(f"--check {run} takes the plan of that run: omit {other}, all options but --json")
    from unisono.foresight.ledger import ended_run
    from unisono.foresight.report import check_data, check_lines

    seal, measurement = ended_run(run)
    if as_json:
        print(json.dumps(check_data(seal.prediction, measurement), indent=1))
    else:
        print("\n".join(check_lines(seal.prediction, measurement)))
