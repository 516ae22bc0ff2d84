"""`unisono plan`: a run planned before it starts; `unisono foresight`: errors of the plans of runs that have ended."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from typer import Argument, Option

from unisono.errors import UsageError
from unisono.formats import MAX_DIGITS, counted

if TYPE_CHECKING:
    from unisono.plan.machines import MachineFacts
    from unisono.plan.planned_run import PlannedRun
    from unisono.plan.run_plan import RunPlan
    from unisono.plan.run_report import PlannedLayer
    from unisono.training.recipe_plan import PlanRecipe


@contextmanager
def paused_collection() -> Iterator[None]:
    """Pause Python's garbage collection inside, a quarter of the time of a plan on 40,960 nodes.

    Each full collection walks the 170,000 objects that `import torch` makes, and the ranks and rounds of large
    schedules. Reference counts still free memory; only cycles stay. What is alive at the end is walked by no later
    collection: the first one would come at once, and take a second.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.freeze()
            gc.enable()


@paused_collection()
def plan(
    recipe: Annotated[
        Path | None,
        Argument(
            help="Recipe, a TOML file or a name such as digits: its network, batch, rule, exchange, optimizer and data."
        ),
    ] = None,
    machine: Annotated[str | None, Option(help="Name of a machine, or its TOML file.")] = None,
    nodes: Annotated[str, Option(help="Numbers of nodes: 1,2,4, or 1,2,4,...,1024 with the same factor.")] = "1",
    model: Annotated[str | None, Option(help="Name of a network, or module:function, in place of a recipe.")] = None,
    changes: Annotated[
        list[str] | None,
        Option(
            "--set",
            help="Value of a key of the recipe, training.batch=256, or of its samples: samples.shape=3x224x224, "
            "classes, train, test, bytes, pixels. May be repeated.",
        ),
    ] = None,
    ranks_per_node: Annotated[int, Option(help="Ranks of a node, which share its computing.")] = 1,
    what_if: Annotated[
        list[str] | None,
        Option(
            help="Change, shown beside the plan without it: bandwidth=2x, exchange.wire=bfloat16; several together "
            "with commas. May be repeated."
        ),
    ] = None,
    worthwhile: Annotated[float, Option(help="Speedup that each further node must add for more nodes to pay.")] = 0.5,
    layers: Annotated[bool, Option("--layers", help="Print a table of the layers for each number of nodes.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
    chart: Annotated[Path | None, Option(help="Output file for a chart of the speedup, SVG.")] = None,
    check: Annotated[
        Path | None, Option(help="Folder of a run that has ended: its prediction beside what was measured.")
    ] = None,
) -> None:
    """Predict the step, speedup, memory and bottleneck of a run on each number of nodes, before it starts."""
    if check is not None:
        beside = {"--chart": chart, "--set": changes, "--what-if": what_if, "--nodes": nodes != "1", "--layers": layers}
        beside |= {"--ranks-per-node": ranks_per_node != 1, "--worthwhile": worthwhile != 0.5}
        _check(check, as_json, machine or model or recipe or next((name for name in beside if beside[name]), None))
        return
    from unisono.plan.machines import find_machine, machine_names
    from unisono.training.recipe_plan import plan_recipe
    from unisono.training.recipe_plan import what_if as changed

    if machine is None:
        known = ", ".join(machine_names())
        raise UsageError(f"--machine is missing: there are {known}, or give a TOML file, such as ./mine.toml")
    if ranks_per_node < 1:
        raise UsageError(f"--ranks-per-node {ranks_per_node}: it is 1 at least")
    if not 0 < worthwhile <= 1:
        raise UsageError(f"--worthwhile {worthwhile:g}: it is a share of one node's speed, above 0 and at most 1")
    settings, counts, facts = plan_recipe(recipe, model, changes or ()), node_counts(nodes), find_machine(machine)
    before = _predict(settings, facts, counts, ranks_per_node)
    after = {change: _predict(*changed(settings, facts, change), counts, ranks_per_node) for change in what_if or ()}
    if chart is not None:
        from unisono.view.chart import write_picture

        write_picture(chart, _picture(before, after), "--chart")
    wanted = counts if layers else ()
    if as_json:
        print(json.dumps(_data(before, after, worthwhile, wanted), indent=1))
    else:
        print("\n".join(_lines(before, after, worthwhile, wanted)))


class _Planned(NamedTuple):
    """Plan of a run: a title, and its rows."""

    title: str
    run: PlannedRun
    rows: list[RunPlan]

    def layers_on(self, nodes: int) -> list[PlannedLayer]:
        """Return the layers of the run on so many nodes, split as the plan has them there."""
        from unisono.plan.run_report import layers_of

        split = next(row.split for row in reversed(self.rows) if row.nodes == nodes)
        return layers_of(replace(self.run, nodes=nodes), split)


def _predict(recipe: PlanRecipe, machine: MachineFacts, counts: tuple[int, ...], ranks_per_node: int) -> _Planned:
    from unisono.plan.run_plan import plan_run
    from unisono.training.recipe_plan import planned_run

    run = planned_run(recipe, machine, counts[-1], ranks_per_node)
    return _Planned(f"{recipe.model.name}, {run.minibatch} samples a step", run, plan_run(run, counts))


def _picture(before: _Planned, after: Mapping[str, _Planned]) -> bytes:
    from unisono.plan.run_report import changed_rules
    from unisono.view.predictions import draw_plans

    altered = [row for change, planned in after.items() for row in changed_rules(before.rows, planned.rows, change)]
    return draw_plans([*before.rows, *altered], before.title, before.run.machine.name)


def _lines(before: _Planned, after: Mapping[str, _Planned], least: float, layers: tuple[int, ...]) -> Iterator[str]:
    """Yield the plan as a table, what the changes make of it, and its layers on these numbers of nodes."""
    from unisono.plan.run_report import as_lines, compare, comparison_lines, layer_lines

    yield f"{before.title}, on {before.run.machine.name}\n"
    yield from as_lines(before.rows, before.run, least)
    changes = [row for change, planned in after.items() for row in compare(before.rows, planned.rows, change)]
    if changes:
        yield ""
        yield from comparison_lines(changes)
    for nodes in layers:
        yield f"\nlayers on {counted(nodes, 'node')}\n"
        yield from layer_lines(before.layers_on(nodes))


def _data(before: _Planned, after: Mapping[str, _Planned], least: float, layers: tuple[int, ...]) -> dict[str, object]:
    """Return the plan as data, with what the changes make of it, and its layers on these numbers of nodes."""
    from unisono.plan.run_report import as_data, compare, comparison_data

    data: dict[str, object] = as_data(before.rows, before.run, least)
    if after:
        data["what_if"] = [
            {
                "change": change,
                "rows": comparison_data(compare(before.rows, planned.rows, change)),
                "plan": as_data(planned.rows, planned.run, least),
            }
            for change, planned in after.items()
        ]
    if layers:
        data["layers"] = {nodes: [layer._asdict() for layer in before.layers_on(nodes)] for nodes in layers}
    return data


def _check(run: Path, as_json: bool, extra: str | Path | None) -> None:
    """Print the prediction of a run beside its measurement, part by part."""
    if extra is not None:
        raise UsageError(f"--check {run} takes the plan of that run: omit {extra}, all options but --json")
    from unisono.foresight.compare import check_data, check_lines
    from unisono.foresight.ledger import ended_run

    seal, measurement = ended_run(run)
    if as_json:
        print(json.dumps(check_data(seal.prediction, measurement), indent=1))
    else:
        print("\n".join(check_lines(seal.prediction, measurement)))


def node_counts(text: str) -> tuple[int, ...]:
    """Return numbers of nodes: 1,2,4,...,32 are 1, 2, 4, 8, 16 and 32. Raises UsageError for anything else."""
    before, dots, last = text.partition(",...,")
    counts = [_number(part) for part in before.split(",")]
    if dots:
        if len(counts) < 2 or not 0 < counts[-2] < counts[-1] <= _number(last) or counts[-1] % counts[-2]:
            raise UsageError(f"--nodes {text}: two numbers, the second a multiple, go before the dots, the last behind")
        factor = counts[-1] // counts[-2]
        while counts[-1] * factor <= _number(last):
            counts.append(counts[-1] * factor)
    if min(counts) < 1 or sorted(set(counts)) != counts:
        raise UsageError(f"--nodes {text}: give rising numbers, 1 or more, as in 1,2,4 or 1,2,4,...,1024")
    return tuple(counts)


def _number(text: str) -> int:
    """Return a whole number; 0 for other words, and for more digits than any number here has."""
    return int(text) if text.isdecimal() and len(text) <= MAX_DIGITS else 0


def foresight(
    ledger: Annotated[Path, Argument(help="Ledger of runs.")] = Path("runs/ledger.jsonl"),
    by: Annotated[
        str, Option(help="Label that groups runs: version, rule, model, machine, ranks, ..., or one of your own.")
    ] = "version",
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
    chart: Annotated[Path | None, Option(help="Output file for a chart of calibration, SVG.")] = None,
) -> None:
    """Compare the predicted steps of runs with the measured ones: errors, coverage of the intervals, worst runs."""
    from unisono.foresight.ledger import changed_seals, check_label, ledger_data, ledger_lines, read

    entries, complaints = read(ledger)
    complaints += changed_seals(ledger, entries)
    check_label(entries, by)
    if chart is not None:
        from unisono.view.chart import write_picture
        from unisono.view.predictions import draw_calibration

        write_picture(chart, draw_calibration(entries, by), "--chart")
    if as_json:
        print(json.dumps(ledger_data(entries, complaints, by), indent=1))
        return
    for line in complaints:
        print(f"unisono: {line}", file=sys.stderr)
    if not entries:
        raise UsageError(f"{ledger} has no runs: unisono train adds one at its end")
    print("\n".join(ledger_lines(entries, by)))
