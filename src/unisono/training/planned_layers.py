"""Split layers of a planned run: by prediction, or those that its recipe asks for.

A run with `plan="auto"` takes all but its measured seconds from the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from unisono.errors import UsageError
from unisono.plan.split import LayerFacts, SplitInputs
from unisono.plan.split_plan import SplitModel
from unisono.plan.trace import Trace
from unisono.tensor_parallel.check import check_plan
from unisono.tensor_parallel.choose_plan import facts_of, whole_layers
from unisono.tensor_parallel.plan import AUTO, make_plan
from unisono.training.planned_run import PlannedRun
from unisono.training.recipe import ParallelRecipe


def split_model_of(run: PlannedRun, network: nn.Module, traced: Trace, samples: int) -> SplitModel:
    """Return a network, traced for `samples` samples, as a plan splits it: by prediction, or as a recipe says.

    Nothing is split where no rule, or the optimizer, takes split layers. Raises UsageError for a recipe whose layers
    are split under rules that do not take them.
    """
    able = [rule for rule in run.rules.values() if whole_layers(rule, run.optimizer) is None]
    given = run.parallel.layers or AUTO
    if not able and not isinstance(given, str):
        raise UsageError(f"[parallel] names layers, but no rule of {', '.join(run.rules)} takes split ones: plan bsp")

    def facts(ranks: int) -> tuple[LayerFacts, ...]:
        return facts_of(network, traced.layers, traced.once, samples, ranks)

    if not able:
        return SplitModel(facts, lambda _: {})
    if isinstance(given, str):
        return SplitModel(facts)
    return SplitModel(facts, splits_of(run.parallel, network))


def splits_of(parallel: ParallelRecipe, network: nn.Module) -> Callable[[SplitInputs], Mapping[str, str]]:
    """Return the function that gives the splits of a recipe's table [parallel], whatever the machine.

    It raises UsageError for splits that the network or the ranks do not allow.
    """

    def choose(inputs: SplitInputs) -> Mapping[str, str]:
        assert not isinstance(parallel.layers, str), "the layers are named"
        ranks = inputs.links.placement.ranks
        plan = check_plan(make_plan(parallel.layers, parallel.ranks or ranks), network, ranks)
        return plan.words

    return choose
