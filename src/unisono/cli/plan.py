"""`unisono plan`: a run planned before it starts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from unisono.errors import UsageError

TRACED_SAMPLES = 2
"""Samples of a trace: batch norm needs more than one."""


def plan(
    machine: Annotated[str, typer.Option(help="Name of a machine, or its TOML file.")],
    nodes: Annotated[str, typer.Option(help="Numbers of nodes: 1,2,4, or 1,2,4,...,1024 with the same factor.")] = "1",
    model: Annotated[str | None, typer.Option(help="Name of a network, or module:function.")] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="Recipe: its network, batch, rule, exchange and optimizer.")
    ] = None,
    minibatch: Annotated[int | None, typer.Option(help="Samples of a step, over all ranks.")] = None,
    inputs: Annotated[
        str | None, typer.Option("--input", help="Shape of a sample, as 3x224x224; default: as in the network's paper.")
    ] = None,
    classes: Annotated[int, typer.Option(help="Number of classes.")] = 1000,
    optimizer: Annotated[str | None, typer.Option(help="Name of the optimizer; default: sgd with momentum.")] = None,
    ranks_per_node: Annotated[int, typer.Option(help="Ranks of a node, which share its computing.")] = 1,
    rule: Annotated[str | None, typer.Option(help="Rules: bsp,sharded,local_sgd:16; default: bsp.")] = None,
    wire: Annotated[str | None, typer.Option(help="Number format between nodes, such as bfloat16.")] = None,
    epoch_samples: Annotated[int | None, typer.Option(help="Samples of an epoch.")] = None,
    epochs: Annotated[int, typer.Option(help="Epochs of the run, for --time.")] = 1,
    what_if: Annotated[
        list[str] | None, typer.Option(help="Value of the machine and its factor: bandwidth=2x. May be repeated.")
    ] = None,
    slow_link: Annotated[
        list[str] | None, typer.Option(help="NODE:FACTOR, its link is that many times slower. May be repeated.")
    ] = None,
    slow_node: Annotated[
        list[str] | None, typer.Option(help="NODE:FACTOR, it computes that many times as long. May be repeated.")
    ] = None,
    simulated: Annotated[
        bool,
        typer.Option("--simulate", help="Simulate the collectives of each bucket size instead of estimating them."),
    ] = False,
    worthwhile: Annotated[
        float, typer.Option(help="Least speedup that each further node adds, where more nodes pay.")
    ] = 0.5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    time: Annotated[bool, typer.Option("--time", help="Print nothing but the wall time, for sbatch --time.")] = False,
    chart: Annotated[Path | None, typer.Option(help="Output file for a chart of the speedup, SVG.")] = None,
) -> None:
    """Predict the step, speedup, memory and bottleneck of a run on each number of nodes, before it starts."""
    if (model is None) == (recipe is None):
        raise UsageError("give --model NAME or --recipe FILE, one of them")
    for option, number in (("ranks-per-node", ranks_per_node), ("epochs", epochs), ("classes", classes)):
        if number < 1:
            raise UsageError(f"--{option} {number}: it is 1 at least")
    from unisono.bench.contender import shape_of
    from unisono.plan.machines import find_machine
    from unisono.plan.run_chart import draw_chart
    from unisono.plan.run_plan import plan_run
    from unisono.plan.run_report import as_data, as_lines, wall_time
    from unisono.plan.what_if import changed_machine
    from unisono.rules import Exchange
    from unisono.training.planned_run import planned_run, rule_of, settings_of, traced_layers

    counts, shape = _node_counts(nodes), _sample_shape(inputs)
    found = find_machine(machine)
    for words in what_if or ():
        found = changed_machine(found, words)
    slow_links = _factors("--slow-link", slow_link or (), max(counts))
    found = replace(found, slow_links={**found.slow_links, **slow_links})
    slow_nodes = _factors("--slow-node", slow_node or (), max(counts))
    run = planned_run(recipe, model, minibatch)
    if wire is not None or rule is not None:
        run = replace(run, rules={one: rule_of(one, Exchange(wire=wire)) for one in (rule or "bsp").split(",")})
    run = replace(run, optimizer=optimizer or run.optimizer, epoch_samples=epoch_samples)
    layers = traced_layers(run, shape or shape_of(run.name, 1)[1:], classes, TRACED_SAMPLES)
    settings = settings_of(run, counts, ranks_per_node, TRACED_SAMPLES)
    plans = plan_run(layers, found, replace(settings, slow_nodes=slow_nodes, simulated=simulated))
    if chart is not None:
        draw_chart(plans, f"{run.name}, {run.minibatch} samples, {found.name}", chart)
    if time:
        print(wall_time(plans, epochs, run.minibatch, epoch_samples))
    elif as_json:
        print(json.dumps(as_data(plans, found, worthwhile), indent=1))
    else:
        print(f"{run.name}, {run.minibatch} samples a step, on {found.name}\n")
        print("\n".join(as_lines(plans, found, worthwhile)))


def _node_counts(words: str) -> tuple[int, ...]:
    """Return numbers of nodes: 1,2,4,...,32 are 1, 2, 4, 8, 16 and 32."""
    before, dots, last = words.partition(",...,")
    counts = [int(one) if one.isdecimal() else 0 for one in before.split(",")]
    if dots:
        if len(counts) < 2 or not last.isdecimal() or not 0 < counts[-2] < counts[-1] or counts[-1] % counts[-2]:
            raise UsageError(f"--nodes {words}: two numbers, the second a multiple, go before the dots, one behind")
        factor = counts[-1] // counts[-2]
        while counts[-1] * factor <= int(last):
            counts.append(counts[-1] * factor)
    if min(counts) < 1 or sorted(set(counts)) != counts:
        raise UsageError(f"--nodes {words}: give rising numbers, 1 or more, as in 1,2,4 or 1,2,4,...,1024")
    return tuple(counts)


def _factors(option: str, given: Sequence[str], nodes: int) -> dict[int, float]:
    """Return the factors of nodes from words such as 3:4. Raises UsageError for other words, and for other nodes."""
    found = {}
    for words in given:
        node, _, factor = words.partition(":")
        try:
            times = float(factor) if node.isdecimal() else 0.0
        except ValueError:
            times = 0.0
        if not 1 <= times < float("inf"):
            raise UsageError(f"{option} {words}: give NODE:FACTOR, a factor of 1 or more, as in 3:4")
        if int(node) >= nodes:
            raise UsageError(f"{option} {words}: there is no node {node}; nodes are 0 to {nodes - 1}")
        found[int(node)] = times
    return found


def _sample_shape(words: str | None) -> tuple[int, ...]:
    """Return the shape that words such as 3x224x224 give; empty without any."""
    sizes = tuple(int(one) if one.isdecimal() else 0 for one in words.split("x")) if words is not None else ()
    if not all(sizes):
        raise UsageError(f"--input {words}: give the shape of a sample, as in 3x224x224")
    return sizes
