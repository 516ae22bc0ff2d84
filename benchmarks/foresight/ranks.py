"""Seals predictions of a cluster's runs, then measures the runs. Started on the ranks of the lab by run.py.

    machine file of the probe ─▶ predictions ─▶ SEALED.jsonl ─▶ first step ... last step ─▶ ledger.jsonl

python ranks.py SET SEED CLUSTER FOLDER KINDS
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from settings import CHOICES, CHOICES_ON, DRAWS, Cluster, Run
from slept import SleptNetwork

import unisono
from unisono.errors import UsageError
from unisono.foresight.ledger import LEDGER, LedgerEntry, append, read
from unisono.foresight.seal import Measurement, RunFacts, SealedPrediction, measure
from unisono.models import input_shape
from unisono.plan.machines import EfficiencyFacts, MachineFacts, find_machine
from unisono.plan.planned_run import PlannedRun, product_seconds
from unisono.plan.trace import TracedLayer
from unisono.rules import BSP, BaseRule, Exchange, find_rule
from unisono.tables import parse
from unisono.training.foresight import planned_prediction
from unisono.training.recipe_plan import TRACED_SAMPLES as TRACED
from unisono.training.recipe_plan import traced_network
from unisono.training.trainer import KINDS
from unisono.world import World

EVEN_BATCH = 24
"""Samples a rank whose computing takes as long as the ideal exchange of all gradients."""

MEASURED_SECONDS, MIN_STEPS, MAX_STEPS = 3.0, 12, 32
WARM_UP = 4


class Contender(NamedTuple):
    """Run of the cluster with a rule and a wire."""

    number: int
    run: Run
    kind: str
    """`drawn`, `choice` or `repeated`."""
    rule: str
    wire: str


def contenders(cluster: Cluster, all_choices: bool) -> list[Contender]:
    """Return the runs that are measured: those drawn, one of them again, and with `all_choices` each choice."""
    chosen = []
    for place, run in enumerate(cluster.runs):
        chosen.append(Contender(place, run, "drawn", run.rule, run.wire))
        if place == 0:
            chosen.append(Contender(place, run, "repeated", run.rule, run.wire))
        if all_choices:
            chosen += [Contender(place, run, "choice", *choice) for choice in CHOICES]
    return chosen


def rule_named(label: str, wire: str) -> BaseRule:
    """Return the rule that a contender names."""
    exchange = Exchange(wire=wire or None)
    if label == "bsp without overlap":
        return BSP(exchange, overlap="none")
    name, _, every = label.partition(":")
    return find_rule(name)(exchange, **({"every": int(every)} if every else {}))


def small_layers(run: Run, cluster: Cluster) -> list[TracedLayer]:
    """Return the layers of the network with parameters, these made smaller in proportion."""
    _, traced = traced_network(run.network, "", input_shape(run.network), 1000)
    layers = [layer for layer in traced.layers if layer.parameters]
    wanted = cluster.link_seconds * cluster.megabits * 1e6 / 8
    scale = wanted / sum(layer.parameter_bytes for layer in layers)
    sizes = [max(1, round(layer.parameter_bytes * scale / 4)) for layer in layers]
    return [
        replace(layer, parameters=size, parameter_bytes=4 * size, gradient_bytes=4 * size)
        for layer, size in zip(layers, sizes, strict=True)
    ]


def slept_machine(probed: MachineFacts, layers: list[TracedLayer], cluster: Cluster, late: float) -> MachineFacts:
    """Return the probed machine with the rate of the slept computing; of the late host, for which all others wait."""
    ideal = 2 * (cluster.ranks - 1) / cluster.ranks * cluster.link_seconds
    flops = EVEN_BATCH * sum(layer.flops for layer in layers) / TRACED / ideal
    node = replace(probed.node, flops=flops / (late or 1.0))
    return replace(probed, node=node, efficiency=EfficiencyFacts(), products=())


def predict(probed: MachineFacts, cluster: Cluster, contender: Contender) -> SealedPrediction:
    """Return the prediction for a contender."""
    layers = small_layers(contender.run, cluster)
    machine = slept_machine(probed, layers, cluster, contender.run.late)
    rule = rule_named(contender.rule, contender.wire)
    samples = contender.run.batch * cluster.ranks
    run = PlannedRun(machine, layers, TRACED, rule, samples, cluster.ranks)
    facts = RunFacts(
        "", contender.run.network, contender.rule, cluster.ranks, cluster.ranks, samples, machine=machine.name
    )
    return planned_prediction(run, facts)


def no_loss(scores: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Return the mean: how long it takes is all that matters."""
    return scores.mean()


def slept_run(world: World, probed: MachineFacts, cluster: Cluster, run: Run) -> tuple[unisono.Trainer, SleptNetwork]:
    """Return a trainer and its network, whose computing takes as long as predicted."""
    layers = small_layers(run, cluster)
    machine = slept_machine(probed, layers, cluster, run.late if world.rank == world.size - 1 else 0.0)
    scale = run.batch / TRACED
    network = SleptNetwork(
        [layer.parameters for layer in layers],
        [scale * product_seconds(layer, layer.forward_flops, machine) for layer in layers],
        [scale * product_seconds(layer, layer.backward_flops, machine) for layer in layers],
    )
    optimizer = torch.optim.SGD(network.parameters(), 1e-3, momentum=0.9)
    trainer = unisono.Trainer(network, world, rule_named(run.rule, run.wire), optimizer, no_loss)
    network.clock = lambda: time.perf_counter() - trainer.reducer.times.waiting
    return trainer, network


def measured(world: World, probed: MachineFacts, cluster: Cluster, contender: Contender, step: float) -> Measurement:
    """Return the measurement of a contender whose step is predicted to take `step` seconds."""
    group = world.split(0)
    trainer, _ = slept_run(group, probed, cluster, replace(contender.run, rule=contender.rule, wire=contender.wire))
    rule = trainer.reducer.rule
    inputs, labels = torch.ones(1, 1), torch.zeros(1)
    searched = rule.traits.period == 1 and rule.overlap == "auto"
    while searched and trainer.reducer.programs.tuning.state() is None:
        trainer.step(inputs, labels)
    trainer.wait()
    trainer.recorder.take_steps()
    steps = int(min(MAX_STEPS, max(MIN_STEPS, MEASURED_SECONDS / step)))
    for _ in range(WARM_UP + steps + -steps % rule.traits.period):
        trainer.step(inputs, labels)
    trainer.wait()
    everyone = np.stack(world.all_gather_object(trainer.recorder.take_steps()))
    group.free()
    measurement = measure(everyone, KINDS, WARM_UP, rule.traits.period)
    assert measurement is not None, "there are steps behind the first"
    return measurement


def sealed_predictions(path: Path, probed: MachineFacts, cluster: Cluster, chosen: list[Contender]) -> list[Any]:
    """Return the predictions in a file of seals, which is written where there is none."""
    if not path.exists():
        lines = "".join(
            json.dumps([case._asdict() | {"run": asdict(case.run)}, asdict(predict(probed, cluster, case))]) + "\n"
            for case in chosen
        )
        with path.open("w") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
        print(f"sealed {len(chosen)} predictions: {hashlib.sha256(lines.encode()).hexdigest()}", flush=True)
    lines = path.read_text().splitlines()
    return [parse(SealedPrediction, json.loads(line)[1], str(path), UsageError, strict=False) for line in lines]


def is_measured(ledger: Path, labels: dict[str, str]) -> bool:
    """Return True where a ledger has a run with these labels."""
    return ledger.exists() and any(dict(entry.labels) == labels for entry in read(ledger)[0])


def main(name: str, seed: str, index: str, folder: str, kinds: str) -> None:
    """Seal all predictions of a cluster, then measure its runs of these kinds that were not measured yet."""
    world = unisono.init()
    cluster, home = DRAWS[name](int(seed))[int(index)], Path(folder)
    probed, ledger = find_machine(str(home / f"cluster-{index}.toml")), home / LEDGER
    chosen = contenders(cluster, name == "drawn" and int(index) < CHOICES_ON)
    sealed = world.call_on_root(lambda: sealed_predictions(home / f"sealed-{index}.jsonl", probed, cluster, chosen))
    for case, prediction in zip(chosen, sealed, strict=True):
        labels = {"cluster": index, "place": str(case.number), "kind": case.kind, "batch": str(case.run.batch)}
        labels |= {"late": f"{case.run.late:g}", "slow": f"{cluster.slow_host:g}", "choice": f"{case.rule} {case.wire}"}
        labels |= {"hosts": f"{cluster.supernodes} x {cluster.hosts}", "rate": f"{cluster.megabits}"}
        if case.kind not in kinds.split(",") or world.call_on_root(partial(is_measured, ledger, labels)):
            continue
        result = measured(world, probed, cluster, case, prediction.step)
        if world.rank == 0:
            append(ledger, LedgerEntry(prediction, result, version("unisono"), labels))
            off = prediction.step / result.step.median - 1
            inside = "in" if prediction.low <= result.step.median <= prediction.high else "OUT"
            label = f"{case.kind:8} {case.run.network:9} {case.run.batch:3} {case.rule} {case.wire}"
            print(f"{label}: {prediction.step:.3f} {result.step.median:.3f} {off:+.1%} {inside} {result.disturbed}")
            sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
