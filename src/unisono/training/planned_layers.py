"""Split layers of a planned run: facts of its network's layers on a machine, and the splits that its recipe asks for.

    network without memory ─ forward passes ─▶ sizes, calls, pairs of its modules ┐
    FLOPs, machine ──────────────────────────▶ seconds of a forward pass          ┴▶ facts of a run that chooses layers

A run with `plan="auto"` measures the seconds and takes all else from the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from unisono.errors import UsageError
from unisono.plan.layer_costs import product_seconds
from unisono.plan.machines import MachineFacts
from unisono.plan.split import FORMS, LayerFacts, SplitCandidate, SplitInputs, candidate
from unisono.plan.split_plan import SplitModel, fastest_split
from unisono.plan.trace import TracedLayer
from unisono.tensor_parallel.check import check_plan
from unisono.tensor_parallel.choose_plan import facts_of, whole_layers
from unisono.tensor_parallel.plan import AUTO, DROPOUT, make_plan
from unisono.tensor_parallel.trace import trace_forward
from unisono.training.planned_run import PlannedRun
from unisono.training.recipe import ParallelRecipe


def split_model_of(
    run: PlannedRun, machine: MachineFacts, network: nn.Module, example: Tensor, layers: Sequence[TracedLayer]
) -> SplitModel:
    """Return the network as a plan splits it: by prediction, unless the recipe names the layers.

    Nothing is split where no rule, or the optimizer, takes split layers.

    `layers` are those of the network, traced for `example`, on the meta device. Raises UsageError for a recipe whose
    layers are split under rules that do not take them.
    """
    able = [rule for rule in run.rules.values() if whole_layers(rule, run.optimizer) is None]
    given = run.parallel.layers or AUTO
    if not able and not isinstance(given, str):
        raise UsageError(f"[parallel] names layers, but no rule of {', '.join(run.rules)} takes split ones: plan bsp")
    samples = len(example)
    traces = trace_forward(network.train(), example, lambda: torch.device("meta"), repetitions=1)
    once = {name for name, trace in traces.items() if trace.once}
    seconds = dict.fromkeys(traces, 0.0) | {
        layer.name: product_seconds(layer, layer.forward_flops, machine) / samples for layer in layers
    }

    def facts(ranks: int) -> tuple[LayerFacts, ...]:
        return facts_of(network, traces, seconds, once, samples, ranks)

    if not able:
        return SplitModel(facts, lambda inputs: candidate(inputs, 1, {}))
    return SplitModel(facts, fastest_split if isinstance(given, str) else splits_of(run.parallel, network))


def splits_of(parallel: ParallelRecipe, network: nn.Module) -> Callable[[SplitInputs], SplitCandidate]:
    """Return the function that gives the splits of a recipe's table [parallel], whatever the machine.

    It raises UsageError for splits that the network or the ranks do not allow, and for those that cannot be predicted.
    """

    def choose(inputs: SplitInputs) -> SplitCandidate:
        assert not isinstance(parallel.layers, str), "the layers are named"
        plan = check_plan(make_plan(parallel.layers, parallel.ranks or inputs.ranks), network, inputs.ranks)
        if len(plan.sizes) > 1:
            sizes = ", ".join(map(str, plan.sizes))
            raise UsageError(f"[parallel] has groups of {sizes} ranks: only groups of one size are planned; use one")
        splits = dict[str, str]()
        for name, split in plan.layers:
            how, _, *flows = str(split).split()
            words = " ".join([how, *flows])
            if split.how != DROPOUT and split.ranks > 1:
                splits[name] = words
                if words not in FORMS:
                    raise UsageError(
                        f"layer {name!r} is split by {words!r}, which is not predicted: plan one of {', '.join(FORMS)}"
                    )
        return candidate(inputs, max(plan.sizes, default=1), splits)

    return choose
