"""Split layers of a planned run: facts of its network's layers, and the splits that its recipe asks for.

    network without memory ─ forward passes ─▶ sizes, calls, pairs of its modules ─▶ facts of a run that chooses layers

A run with `plan="auto"` takes all but its measured seconds from the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from unisono.errors import UsageError
from unisono.plan.split import LayerFacts, SplitInputs
from unisono.plan.split_plan import SplitModel
from unisono.tensor_parallel.check import check_plan
from unisono.tensor_parallel.choose_plan import facts_of, whole_layers
from unisono.tensor_parallel.groups import within_nodes
from unisono.tensor_parallel.plan import AUTO, DROPOUT, make_plan
from unisono.tensor_parallel.trace import trace_forward
from unisono.training.planned_run import PlannedRun
from unisono.training.recipe import ParallelRecipe


def split_model_of(run: PlannedRun, network: nn.Module, example: Tensor) -> SplitModel:
    """Return the network, on the meta device, as a plan splits it: by prediction, unless the recipe names the layers.

    Nothing is split where no rule, or the optimizer, takes split layers. Raises UsageError for a recipe whose layers
    are split under rules that do not take them.
    """
    able = [rule for rule in run.rules.values() if whole_layers(rule, run.optimizer) is None]
    given = run.parallel.layers or AUTO
    if not able and not isinstance(given, str):
        raise UsageError(f"[parallel] names layers, but no rule of {', '.join(run.rules)} takes split ones: plan bsp")
    traces = trace_forward(network.train(), example, lambda: torch.device("meta"), repetitions=1)
    once = {name for name, trace in traces.items() if trace.once}

    def facts(ranks: int) -> tuple[LayerFacts, ...]:
        return facts_of(network, traces, list(traces), once, len(example), ranks)

    if not able:
        return SplitModel(facts, within_nodes, lambda _: {})
    if isinstance(given, str):
        return SplitModel(facts, within_nodes)
    return SplitModel(facts, within_nodes, splits_of(run.parallel, network))


def splits_of(parallel: ParallelRecipe, network: nn.Module) -> Callable[[SplitInputs], Mapping[str, str]]:
    """Return the function that gives the splits of a recipe's table [parallel], whatever the machine.

    It raises UsageError for splits that the network or the ranks do not allow.
    """

    def choose(inputs: SplitInputs) -> Mapping[str, str]:
        assert not isinstance(parallel.layers, str), "the layers are named"
        ranks = inputs.links.placement.ranks
        plan = check_plan(make_plan(parallel.layers, parallel.ranks or ranks), network, ranks)
        return {name: str(split) for name, split in plan.layers if split.how != DROPOUT and split.ranks > 1}

    return choose
