"""Linear layers whose exchanges run beside their products are those that wait, and the whole layer."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from tests.mpi.tensor_parallel.networks import CASES, Case, alone, model_of, normal, train, with_sizes
from torch import nn
from torch.utils.checkpoint import checkpoint

import unisono
from unisono.errors import OperationError
from unisono.tensor_parallel.layer import ParallelLayer
from unisono.tensor_parallel.model import split_model
from unisono.tensor_parallel.overlap.slices import SliceLimits
from unisono.world import World

SECONDS = 60
"""Seconds after which a wait in a test has failed."""

PLANS = {
    "column": {"0": "column"},
    "row": {"0": "row"},
    "pair": {"0": "column gives part", "1": "row takes part"},
    "chain": {"0": "row gives part", "1": "row takes part gives part", "2": "row takes part"},
    "columns": {"0": "column gives part", "1": "column takes part"},
    "columns in a row": {"0": "column gives part", "1": "column takes part gives part", "2": "column takes part"},
    "both": {"0": "row gives part", "1": "column takes part"},
}

Change = Callable[[torch.Tensor], torch.Tensor]
INPUTS: dict[str, tuple[tuple[int, ...], Change]] = {
    "rows": ((7, 12), lambda x: x),
    "extra dimensions": ((2, 5, 12), lambda x: x),
    "not contiguous": ((12, 3, 4), lambda x: x.permute(2, 1, 0)),
    "one row": ((12,), lambda x: x),
    "no row": ((0, 12), lambda x: x),
}


def slices(most: int) -> SliceLimits:
    return SliceLimits(1, 1, most, most)


def network(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(12, 24, bias), nn.Linear(24, 12, bias), nn.Linear(12, 12, bias)).double()


def split(whole: nn.Module, group: World, plan: dict[str, str], most: int) -> nn.Module:
    found = split_model(copy.deepcopy(whole), group, plan)
    for layer in found.modules():
        if isinstance(layer, ParallelLayer):
            layer.limits = slices(most)
    return found


def compare(whole: nn.Module, found: nn.Module) -> None:
    """Compare the gradients of a split model with those of the whole one."""
    for name, one in found.named_parameters():
        layer, _, own = name.rpartition(".")
        part = getattr(found.get_submodule(layer), "parts", {}).get(own)
        expected = whole.get_parameter(name).grad
        if expected is None:
            assert one.grad is None, name
        else:
            own_part = expected if part is None else part.cut(expected)
            torch.testing.assert_close(one.grad, own_part, rtol=1e-12, atol=1e-12, msg=name)


def run(model: nn.Module, x: torch.Tensor, change: Change) -> torch.Tensor:
    y = model(change(x))
    (y * torch.arange(1, 13)).square().sum().backward()
    return y


@pytest.mark.parametrize("most", [1, 2, 3, 5])
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("plan", PLANS)
def test_outputs_and_gradients_are_those_of_the_whole_layer(group: World, plan: str, inputs: str, most: int) -> None:
    whole, (shape, change) = network(), INPUTS[inputs]
    found = split(whole, group, PLANS[plan], most)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    expected = run(whole, x, change)
    gradient, x.grad = x.grad, None
    torch.testing.assert_close(run(found, x, change), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(x.grad, gradient, rtol=1e-12, atol=1e-12)
    compare(whole, found)


@pytest.mark.parametrize("plan", PLANS)
def test_frozen_weights_and_inputs_that_need_no_gradient(group: World, plan: str) -> None:
    for frozen in ("", "0.weight", "0.bias", "1.weight", "2.weight"):
        for needs in (False, True):
            whole = network()
            for name, one in whole.named_parameters():
                one.requires_grad_(name != frozen)
            found = split(whole, group, PLANS[plan], 3)
            x = torch.randn(7, 12, dtype=torch.float64, requires_grad=needs)
            run(whole, x, lambda x: x)
            gradient, x.grad = x.grad, None
            run(found, x, lambda x: x)
            compare(whole, found)
            assert (x.grad is None) == (not needs)
            if needs:
                torch.testing.assert_close(x.grad, gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("plan", PLANS)
def test_recomputation_no_gradients_and_relu_in_place(group: World, plan: str) -> None:
    whole = network(bias=False)
    found = split(whole, group, PLANS[plan], 3)
    x = torch.randn(7, 12, dtype=torch.float64, requires_grad=True)

    def act(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: nn.functional.relu(model[2](model[1](model[0](x))), inplace=True)

    expected = act(whole)(x)
    with torch.no_grad():
        torch.testing.assert_close(act(found)(x), expected, rtol=1e-12, atol=1e-12)
    expected.square().sum().backward()
    for reentrant in (False, True):
        found.zero_grad()
        checkpoint(act(found), x, use_reentrant=reentrant).square().sum().backward()
        compare(whole, found)


@pytest.mark.parametrize("plan", PLANS)
def test_autocast_computes_in_bfloat16_as_layers_that_wait(group: World, plan: str) -> None:
    whole = network().float()
    x = torch.randn(7, 12, requires_grad=True)
    results = []
    for most in (1, 3):
        model = split(whole, group, PLANS[plan], most)
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        y.float().square().sum().backward()
        results.append([y, x.grad, *(one.grad for one in model.parameters())])
        x.grad = None
    for waiting, beside in zip(*results, strict=True):
        assert beside.dtype is waiting.dtype
        torch.testing.assert_close(beside, waiting, rtol=3e-2, atol=3e-2)
    assert results[1][0].dtype is torch.bfloat16


@pytest.mark.parametrize("plan", ["row", "both"])
def test_the_first_exchange_begins_before_the_last_product(
    group: World, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last product of each layer waits for it."""
    if group.size == 1:
        pytest.skip("a rank alone exchanges nothing")
    found = split(network(), group, PLANS[plan], 4)
    layers = [layer for layer in found if isinstance(layer, ParallelLayer)]
    begun, made = threading.Event(), list[str]()

    def beginning(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def act(*arguments: object) -> torch.Tensor:
            assert threading.current_thread() is not threading.main_thread()
            begun.set()
            return call(*arguments)

        return act

    def waiting(compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def act(*arguments: torch.Tensor) -> torch.Tensor:
            made.append("product")
            if len(made) % 4 == 0:
                assert begun.wait(SECONDS), "no exchange has begun before the last product"
                begun.clear()
            return compute(*arguments)

        return act

    for name in ("allreduce", "all_gather", "reduce_scatter"):
        monkeypatch.setattr(layers[0].group, name, beginning(getattr(layers[0].group, name)), raising=False)
    for name in ("mm", "addmm"):
        monkeypatch.setattr(torch, name, waiting(getattr(torch, name)))
    for layer in layers:
        layer.register_forward_pre_hook(lambda *_: begun.clear())
    with torch.no_grad():
        found(torch.randn(8, 12, dtype=torch.float64))
    assert len(made) == 4 * len(layers)


def test_ranks_with_different_rows_get_an_error(group: World, differing: None) -> None:
    """On every rank, in the calling thread."""
    if group.size == 1:
        pytest.skip("one rank is like itself")
    own = group.split(0)
    found = split(network(), own, PLANS["row"], 3)
    with pytest.raises(OperationError, match="give of slice 0 failed: MismatchError") as caught:
        found(torch.zeros(6 + 3 * (own.rank == 0), 12, dtype=torch.float64))
    assert "allreduce" in str(caught.value)


def test_waits_of_sliced_passes_are_times_of_activations(group: World) -> None:
    found = split(network(), group, PLANS["pair"], 3)
    run(found, torch.randn(7, 12, dtype=torch.float64, requires_grad=True), lambda x: x)
    layers = [layer for layer in found if isinstance(layer, ParallelLayer)]
    assert len(layers) == 2 * (group.size > 1)
    if layers:
        times = [one for layer in layers for one in layer.times.medians() or ()]
        assert len(times) == 4
        assert all(one.products > 0 for one in times)
        waited = sum(one.activations for one in times)
        assert waited == pytest.approx(layers[0].times.exchange.seconds)
        assert waited > 0


@pytest.mark.parametrize(
    ("plan", "overlap"),
    [*((plan, "chain") for plan in CASES["mlp"].plans), ("chain", "funnel"), ("chain", "concurrent")],
)
def test_losses_are_those_of_the_whole_network(
    group: World, plan: str, overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are exchanged by other threads at the same time."""
    monkeypatch.setattr(ParallelLayer, "limits", slices(3))
    case = CASES["mlp"]
    expected, _ = alone(case, group, 20)
    for size in (size for size in (2, 3, 4) if group.size % size == 0):
        rule = unisono.BSP(unisono.Exchange(bucket_bytes=500), overlap=overlap)
        model = unisono.parallel(model_of(case), group, rule, plan=with_sizes(case.plans[plan], size))
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)
        assert train(model, optimizer, case, group, range(20)) == pytest.approx(expected, rel=1e-9), size


def test_groups_across_nodes(spread: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices go by messages where ranks of a group are on different nodes."""
    monkeypatch.setattr(ParallelLayer, "limits", slices(3))
    case = Case(lambda: nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 5)), {}, normal(12))
    expected, _ = alone(case, spread, 12)
    plan = {"0": "column gives part", "2": "row takes part"}
    for size in (size for size in (2, 3, 4) if spread.size % size == 0):
        model = unisono.parallel(model_of(case), spread, plan=with_sizes(plan, size))
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)
        assert train(model, optimizer, case, spread, range(12)) == pytest.approx(expected, rel=1e-9), size
