"""Split layers in all that training does with them: overlaps, clipping, ties, copies, other plans, mixed sizes."""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from tests.mpi.tensor_parallel.networks import CASES, SAMPLES, Words, alone, batch, model_of, train, with_sizes
from tests.mpi.tensor_parallel.test_losses import sizes_of
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

import unisono
from unisono.compute.convolution import plan_convolutions
from unisono.compute.convolution_plan import ConvolutionPlan
from unisono.errors import MismatchError, UsageError
from unisono.optimizers import LAMB, LARS
from unisono.optimizers.sharded import has_hooks
from unisono.reducer import reducer_of
from unisono.rules import BaseRule
from unisono.schedules.pieces import bounds
from unisono.step.overlaps import OVERLAPS
from unisono.tensor_parallel.layers import use_sample_dropout
from unisono.tensor_parallel.layouts import SampleNumbers
from unisono.tensor_parallel.model import (
    clip_grad_norm,
    cut_optimizer_state,
    seed_dropout,
    split_model,
    whole_optimizer_state,
    whole_state_dict,
)
from unisono.training.trainer import Trainer
from unisono.world import World

STEPS = 6


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)


def lars(model: nn.Module) -> torch.optim.Optimizer:
    return LARS(model.parameters(), 50.0, weight_decay=1e-3)


def own_lars(model: nn.Module) -> torch.optim.Optimizer:
    return OwnLARS(model.parameters(), 50.0, weight_decay=1e-3)


def lamb(model: nn.Module) -> torch.optim.Optimizer:
    return LAMB(model.parameters(), 0.02)


Make = Callable[[nn.Module], torch.optim.Optimizer]


def by_trainer(model: nn.Module, group: World, rule: unisono.BSP, clip: float | None, make: Make = sgd) -> list[float]:
    """Train a model by a Trainer, whose backward passes do not wait for their exchanges. Return the losses."""
    case = CASES["mlp"]
    trainer = Trainer(model, group, rule, make(model), clip=clip)
    losses = []
    for step in range(STEPS):
        inputs, labels = batch(case, step)
        first, last = bounds(SAMPLES, group.size, group.rank)
        seed_dropout(model, 7, step, first)
        total = trainer.step(inputs[first:last], labels[first:last])
        losses.append(float(group.allreduce(torch.tensor(total, dtype=torch.float64))) / SAMPLES)
    trainer.wait()
    return losses


@pytest.mark.parametrize(
    ("overlap", "clip", "make"),
    [
        *((overlap, None, make) for overlap in OVERLAPS for make in (sgd, lars)),
        *((overlap, 0.3, make) for overlap in ("chain", "none") for make in (sgd, lamb)),
        ("concurrent", 0.3, lamb),
        ("chain", 0.3, own_lars),
    ],
)
def test_a_trainer_with_any_overlap_and_clipping(group: World, overlap: str, clip: float | None, make: Make) -> None:
    """Activations are exchanged inside passes while gradients are exchanged by other threads, or by the main one. LARS
    and LAMB have the norms of whole layers, also where the step is not made in parts."""
    plan, exchange = CASES["mlp"].plans["pair"], unisono.Exchange(bucket_bytes=500)
    own_world = group.split(group.rank)
    rule = unisono.BSP(exchange, overlap="none")
    serial = unisono.parallel(model_of(CASES["mlp"]), own_world, rule, plan=with_sizes(plan, 1))
    expected = by_trainer(serial, own_world, rule, clip, make)
    assert expected[-1] != pytest.approx(expected[2], rel=1e-3), "a network that learns nothing is like any other"
    for size in sizes_of(group):
        rule = unisono.BSP(exchange, overlap=overlap, outstanding=2)
        model = unisono.parallel(model_of(CASES["mlp"]), group, rule, plan=with_sizes(plan, size))
        assert by_trainer(model, group, rule, clip, make) == pytest.approx(expected, rel=1e-9)
    own_world.free()


def test_layers_of_different_sizes(group: World) -> None:
    expected, _ = alone(CASES["mlp"], STEPS)
    sizes = [size for size in (1, 2, 3, 4) if group.size % size == 0]
    plan = {"0": f"column {sizes[-1]}", "3": f"row {sizes[len(sizes) // 2]}", "5": f"column {sizes[0]}"}
    model = unisono.parallel(model_of(CASES["mlp"]), group, plan=plan)
    assert train(model, sgd(model), CASES["mlp"], group, range(STEPS)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_training_continues_with_another_plan_on_other_ranks(group: World, name: str) -> None:
    """After 3 of 6 steps each half of the ranks goes on by itself, as one model group."""
    case = CASES[name]
    expected, _ = alone(case, STEPS)
    plans, sizes = list(case.plans.values()), sizes_of(group)
    model = unisono.parallel(model_of(case), group, plan=with_sizes(plans[0], sizes[-1]))
    optimizer = sgd(model)
    losses = train(model, optimizer, case, group, range(3))
    full_state = whole_state_dict(model), whole_optimizer_state(model, optimizer)
    weights, state = group.call_on_root(lambda: full_state)
    half = group.split(group.rank * 2 // group.size)
    other = unisono.parallel(model_of(case), half, plan=with_sizes(plans[-1], half.size))
    others = sgd(other)
    other.load_state_dict(weights)
    others.load_state_dict(cut_optimizer_state(other, others, state))
    losses += train(other, others, case, half, range(3, STEPS))
    assert losses == pytest.approx(expected, rel=1e-9)
    half.free()


KINDS: list[tuple[Callable[[], nn.Module], str, tuple[int, ...]]] = [
    (lambda: nn.Linear(12, 24), "column", (2, 3, 12)),
    (lambda: nn.Linear(12, 24, bias=False), "row", (2, 3, 12)),
    (lambda: nn.Conv1d(2, 12, 3, stride=2), "column", (2, 2, 9)),
    (lambda: nn.Conv2d(2, 12, 3, padding=1, padding_mode="reflect"), "column", (2, 2, 4, 4)),
    (lambda: nn.Conv2d(2, 12, (1, 2), dilation=2, bias=False), "column", (2, 2, 4, 4)),
    (lambda: nn.Conv3d(2, 12, 2), "column", (2, 2, 3, 3, 3)),
]


@pytest.mark.parametrize(("make", "how", "shape"), KINDS)
def test_layers_of_each_kind(group: World, make: Callable[[], nn.Module], how: str, shape: tuple[int, ...]) -> None:
    """Each rank has samples of its own; the gradient of a part is that of the mean of the group's losses."""
    torch.manual_seed(3)
    unsplit, batches = make().double(), [torch.randn(shape, dtype=torch.float64) for _ in range(group.size)]
    layer, x = nn.Sequential(copy.deepcopy(unsplit)), batches[group.rank].requires_grad_()
    split_model(layer, group, {"0": how})
    unsplit(torch.cat(batches).detach()).square().sum().backward()
    expected = unsplit(x)
    (gradient,) = torch.autograd.grad(expected.square().sum(), x)
    outputs = layer(x)
    outputs.square().sum().backward()
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(x.grad, gradient)
    for name, part in getattr(layer[0], "parts", {}).items():
        mean = unsplit.get_parameter(name).grad / group.size
        torch.testing.assert_close(layer[0].get_parameter(name).grad, part.cut(mean))


ATTENTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "alone": ({}, {"need_weights": False}),
    "weights": ({"bias": False}, {}),
    "weights of heads": ({}, {"average_attn_weights": False}),
    "a mask of all samples": ({}, {"attn_mask": torch.ones(3, 4).triu(2).bool(), "need_weights": False}),
    "a learned mask": ({}, {"attn_mask": torch.linspace(0, 1, 12).double().view(3, 4).requires_grad_()}),
    "a mask of each head": ({}, {"attn_mask": torch.linspace(0, 1, 2 * 12 * 3 * 4).double().view(24, 3, 4)}),
    "padding": ({}, {"key_padding_mask": torch.tensor([[0, 0, 0, 1], [0, 1, 1, 1]]).bool()}),
    "both masks": (
        {},
        {
            "key_padding_mask": torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1]]).bool(),
            "attn_mask": torch.ones(3, 4).triu(2).bool(),
            "need_weights": False,
        },
    ),
}
"""Options of an attention, and of its call."""


@pytest.mark.parametrize("name", ATTENTIONS)
def test_heads_of_an_attention(group: World, name: str) -> None:
    """Queries, keys of another sequence, and masks are of a rank's own samples; on rank 0 no key is padding."""
    options, given = ATTENTIONS[name]
    torch.manual_seed(3)
    unsplit = nn.MultiheadAttention(24, 12, batch_first=True, **options).double()
    model = split_model(nn.ModuleDict({"attention": copy.deepcopy(unsplit)}), group, {"attention": "heads"})
    layer, close = model["attention"], partial(torch.testing.assert_close, rtol=1e-9, atol=1e-12)
    assert layer.in_proj_weight.shape == (72 // group.size, 24)
    queries, keys = (torch.randn(group.size, 2, length, 24, dtype=torch.float64) for length in (3, 4))

    def passes(attention: nn.Module, rank: int) -> list[torch.Tensor]:
        own, masks = [each[rank].clone().requires_grad_() for each in (queries, keys)], dict(given)
        if name == "a learned mask":
            masks["attn_mask"] = given["attn_mask"].detach().clone().requires_grad_()
            own.append(masks["attn_mask"])
        if rank == 0 and "key_padding_mask" in masks:
            masks["key_padding_mask"] = torch.zeros_like(masks["key_padding_mask"])
        outputs = [each for each in attention(own[0], own[1], own[1], **masks) if each is not None]
        sum(each.square().sum() for each in outputs).backward()
        return [*outputs, *(each.grad for each in own)]

    expected = [passes(unsplit, rank) for rank in range(group.size)]
    close(passes(layer, group.rank), expected[group.rank])
    if group.size > 1:  # alone it stays whole
        gradients = {name: each.grad / group.size for name, each in unsplit.named_parameters()}
        for parameter, part in layer.parts.items():
            close(layer.get_parameter(parameter).grad, part.cut(gradients[parameter]))


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("how", ["column", "row"])
def test_the_next_layer_may_change_the_output_in_place(group: World, how: str, even: bool) -> None:
    torch.manual_seed(3)
    unsplit = nn.Sequential(nn.Linear(12, 12, bias=False).double(), nn.ReLU(inplace=True))
    x = torch.randn(2 if even else 1 + group.rank, 12, dtype=torch.float64, requires_grad=True)
    expected = unsplit(x)
    (gradient,) = torch.autograd.grad(expected.square().sum(), x)
    outputs = split_model(copy.deepcopy(unsplit), group, {"0": how})(x)
    outputs.square().sum().backward()
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(x.grad, gradient)


def test_an_input_without_samples_is_refused(group: World) -> None:
    layer = split_model(nn.Sequential(nn.Conv2d(2, 12, 3)), group, {"0": "column"})
    if group.size > 1:
        with pytest.raises(UsageError, match=r"takes \(samples, ...\), 4 dimensions or more, and got \(2, 4, 4\)"):
            layer(torch.zeros(2, 4, 4))


def test_convolutions_follow_the_plan_of_their_algorithms(group: World) -> None:
    case, plan = CASES["convnet"], ConvolutionPlan()
    unsplit, (inputs, _) = model_of(case), batch(case, 0)
    model = split_model(model_of(case), group, {"0": "column", "4": "column"})
    assert plan_convolutions(model, plan) == 2
    torch.testing.assert_close(model.eval()(inputs), unsplit.eval()(inputs))
    seed_dropout(model, 1, 1, 0)
    model.train()(inputs).sum().backward()
    assert {geometry.out_channels for geometry, _ in plan._chosen} == {12 // group.size, 24 // group.size}


def test_each_rank_holds_a_part_of_split_weights_their_buckets_and_their_optimizer_state(group: World) -> None:
    size = sizes_of(group)[-1]
    model = nn.Sequential(nn.Linear(120, 1200), nn.ReLU(), nn.Linear(1200, 120))
    total = sum(parameter.numel() for parameter in model.parameters())
    unisono.parallel(model, group, plan={"0": f"column {size} gives part", "2": f"row {size} takes part"})
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 120)).sum().backward()
    optimizer.step()
    held = sum(parameter.untyped_storage().nbytes() for parameter in model.parameters()) // 4
    assert held == (total - 120) // size + 120
    states = [tensor for state in optimizer.state.values() for tensor in state.values() if tensor.ndim]
    assert sum(tensor.untyped_storage().nbytes() for tensor in states) // 4 == 2 * held
    buckets = sum(view.numel() for view in reducer_of(model).memory.views)
    assert buckets == held
    assert group.size == 1 or all(
        torch.equal(parameter.grad, view)
        for parameter, view in zip(model.parameters(), reducer_of(model).memory.views, strict=True)
    )


def test_a_tied_weight_is_one_part(group: World) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.scores = nn.Embedding(12, 6), nn.Linear(6, 12)
            self.scores.weight = self.words.weight

        def forward(self, numbers: torch.Tensor) -> torch.Tensor:
            return self.scores(self.words(numbers))

    def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
        model(torch.arange(12)).square().sum().backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    torch.manual_seed(2)
    unsplit = Tied().double()
    expected = gradients(unsplit)
    for size in sizes_of(group):
        torch.manual_seed(2)
        model = unisono.parallel(Tied().double(), group, plan={"words": f"row {size}", "scores": f"column {size}"})
        assert model.words.weight is model.scores.weight
        actual = gradients(model)
        part = model.words.parts["weight"] if size > 1 else None
        mine = expected["words.weight"] if part is None else part.cut(expected["words.weight"])
        torch.testing.assert_close(actual["words.weight"], mine)
        assert torch.equal(whole_state_dict(model).get("scores.weight", unsplit.scores.weight), unsplit.scores.weight)


@pytest.mark.parametrize("rule", [unisono.BSP(), unisono.Sharded()])
def test_state_that_an_optimizer_has_from_the_start_is_cut(group: World, rule: BaseRule) -> None:
    torch.manual_seed(3)
    unsplit, inputs = nn.Sequential(nn.Linear(12, 24), nn.Linear(24, 2)).double(), torch.randn(4, 12).double()
    plans = (None, {"0": "column gives part", "1": "row takes part"})
    losses = list[list[float]]()
    for plan in plans:
        model = copy.deepcopy(unsplit)
        optimizer = torch.optim.Adagrad(model.parameters(), 0.05)
        unisono.parallel(model, group, rule, optimizer, plan)
        losses.append([])
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            losses[-1].append(float(loss.detach()))
    assert losses[1] == pytest.approx(losses[0])


def test_a_rank_without_samples_and_accumulation(group: World) -> None:
    """The last rank has no samples in one of two batches whose gradients are accumulated, then in the only one."""
    case, size = CASES["mlp"], sizes_of(group)[0]
    plan = with_sizes({"0": "column gives part", "3": "row takes part"}, size)
    unsplit = model_of(case).eval()
    model = unisono.parallel(model_of(case), group, plan=plan).eval()
    inputs, labels = batch(case, 0)
    absent = group.size > 1 and group.rank == group.size - 1
    present = group.size - (group.size > 1)
    mine = slice(0, 0) if absent else slice(*bounds(SAMPLES, present, group.rank))
    nn.functional.cross_entropy(unsplit(inputs), labels).backward()

    def loss() -> torch.Tensor:
        scores = model(inputs[mine])
        return scores.sum() if absent else nn.functional.cross_entropy(scores, labels[mine])

    for accumulated in (False, True):
        model.zero_grad()
        unisono.add_samples(model, mine.stop - mine.start)
        if accumulated:
            with unisono.no_sync(model):
                loss().backward()
        loss().backward()
        factor = 2 if accumulated else 1
        for (name, parameter), other in zip(model.named_parameters(), unsplit.parameters(), strict=True):
            layer = model.get_submodule(name.rpartition(".")[0])
            part = getattr(layer, "parts", {}).get(name.rpartition(".")[2])
            expected = other.grad if part is None else part.cut(other.grad)
            torch.testing.assert_close(parameter.grad, factor * expected, msg=name)


def test_samples_of_split_layers_are_declared_before_the_first_pass(group: World) -> None:
    model = unisono.parallel(model_of(CASES["mlp"]), group, plan={"0": f"column {group.size}"})
    if group.size == 1:
        return
    with unisono.no_sync(model):
        model(batch(CASES["mlp"], 0)[0]).sum().backward()
    with pytest.raises(UsageError, match="declare those of all passes of an average before the first"):
        unisono.add_samples(model, 3)
    with pytest.raises(UsageError, match=r"in place of synchronize call model\(inputs\[:0\]\)"):
        unisono.synchronize(model)


def fails_once(layer: nn.Module, backward: bool = False) -> None:
    """Make the next pass of a layer fail, before it begins."""

    def fail(*_: object) -> None:
        handle.remove()
        raise ValueError("out of luck")

    handle = layer.register_full_backward_pre_hook(fail) if backward else layer.register_forward_pre_hook(fail)


@pytest.mark.parametrize(
    ("place", "backward", "everywhere"),
    [("10", False, True), ("12", False, True), ("12", True, True), ("0", False, False), ("6", False, False)],
)
def test_the_pass_after_a_failed_one_is_exact(group: World, place: str, backward: bool, everywhere: bool) -> None:
    """On all ranks between the layers of a pair or behind it, and on one rank alone before its group has exchanged.
    Forward passes that failed are no steps."""
    case, mine = CASES["vgg"], slice(*bounds(SAMPLES, group.size, group.rank))
    inputs, labels = batch(case, 0)
    for size in sizes_of(group):
        model = unisono.parallel(model_of(case), group, plan=with_sizes(case.plans["wide"], size))
        for step in (2, 4) if backward else (1, 2):
            unsplit = model_of(case)
            use_sample_dropout(unsplit, SampleNumbers(step=step, first=0))
            nn.functional.cross_entropy(unsplit(inputs), labels).backward()
            if everywhere or group.rank == group.size - 1:
                fails_once(model.get_submodule(place), backward)
                with pytest.raises(ValueError, match="out of luck"):
                    nn.functional.cross_entropy(model(inputs[mine]), labels[mine]).backward()
            model.zero_grad()
            nn.functional.cross_entropy(model(inputs[mine]), labels[mine]).backward()
            for (name, parameter), other in zip(model.named_parameters(), unsplit.parameters(), strict=True):
                part = getattr(model.get_submodule(name.rpartition(".")[0]), "parts", {}).get(name.rpartition(".")[2])
                expected = other.grad if part is None else part.cut(other.grad)
                torch.testing.assert_close(parameter.grad, expected, rtol=1e-9, atol=1e-12, msg=name)


def test_the_pass_after_a_failed_one_may_have_the_same_inputs_on_some_ranks_alone(group: World) -> None:
    """What the failed pass has gathered of them is not taken: the other ranks gather anew."""
    torch.manual_seed(0)
    unsplit, inputs = nn.Sequential(nn.Linear(12, 12), nn.Dropout(), nn.Linear(12, 12)), torch.randn(group.size, 2, 12)
    model = split_model(copy.deepcopy(unsplit), group, {"0": "column gives part", "2": "row takes part"})
    use_sample_dropout(unsplit, SampleNumbers(step=1, first=0))
    own = inputs[group.rank]
    fails_once(model[1])
    with pytest.raises(ValueError, match="out of luck"):
        model(own)
    outputs = model(own if group.rank == 0 else own.clone())
    torch.testing.assert_close(outputs, unsplit(inputs.flatten(0, 1)).view(inputs.shape)[group.rank])


@pytest.mark.parametrize("trains", [False, True])
def test_a_pass_that_fails_on_one_rank_between_layers_that_are_alike_is_an_error_of_all(
    group: World, trains: bool
) -> None:
    """Their activations would be taken for each other's. The next pass is exact."""
    torch.manual_seed(0)
    unsplit = nn.Sequential(nn.Linear(12, 12), nn.Dropout(), nn.Linear(12, 12), nn.Dropout()).train(trains)
    columns = dict.fromkeys("02", f"column {group.size}")
    model, inputs = unisono.parallel(copy.deepcopy(unsplit), group, plan=columns), torch.randn(group.size, 2, 12)
    use_sample_dropout(unsplit, SampleNumbers(step=int(trains), first=0))
    own = inputs[group.rank]
    if group.rank == 0:
        fails_once(model[1])
        with pytest.raises(ValueError, match="out of luck"):
            model(own)
    if group.size > 1:
        with pytest.raises(MismatchError, match=r"ranks of a group are in exchanges \[1, 2.*a pass failed on some"):
            model(own)
    torch.testing.assert_close(model(own), unsplit(inputs.flatten(0, 1)).view(inputs.shape)[group.rank])


def test_a_pass_that_fails_on_one_rank_between_exchanges_is_an_error_of_all(world: World, differing: None) -> None:
    """Its group waits for activations of that pass, and gets those of the next."""
    if world.size > 1:
        case, own = CASES["vgg"], World(world.comm.Dup(), world.placement, world.table)
        model = unisono.parallel(model_of(case), own, plan=with_sizes(case.plans["wide"], own.size)).eval()
        inputs = batch(case, 0)[0]
        if own.rank == 0:
            fails_once(model.get_submodule("10"))
            with pytest.raises(ValueError, match="out of luck"):
                model(inputs)
        with pytest.raises(MismatchError):
            model(inputs)


class Heads(nn.Module):
    """Two heads of one shape on a body."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 12), nn.Linear(6, 12)

    def forward(self, x: torch.Tensor, names: str) -> list[torch.Tensor]:
        hidden = self.body(x)
        return [self.get_submodule(name)(hidden) for name in names]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("where", ["group", "spread"])
def test_layers_of_one_shape_that_ranks_take_for_each_other_are_an_error_of_all(
    request: pytest.FixtureRequest, differing: None, where: str, backward: bool
) -> None:
    """A rank calls the one, or has a loss of the one, another rank the other."""
    ranks: World = request.getfixturevalue(where)
    model = unisono.parallel(Heads(), ranks, plan={"a": "column", "b": "column"})
    own, x = ranks.rank % 2, torch.randn(3, 4)
    if ranks.size == 1:
        model(x, "ab")[own].sum().backward()
    elif backward:
        outputs = model(x, "ab")
        with pytest.raises(MismatchError, match=r"in layer [ab].* in layer [ab]"):
            outputs[own].sum().backward()
    else:
        with pytest.raises(MismatchError, match=r"in layer [ab].* in layer [ab]"):
            model(x, "ab"[own])


class Flattens(nn.Module):
    """Tokens whose dropout takes them as samples."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(4, 12), nn.Dropout(), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up(x)
        outputs: torch.Tensor = self.down(self.drop(up.flatten(0, 1)).unflatten(0, up.shape[:2]))
        return outputs


def test_a_dropout_of_parts_takes_samples_in_the_first_dimension(group: World) -> None:
    model = unisono.parallel(Flattens(), group, plan={"up": "column gives part", "down": "row takes part"})
    if group.size > 1:
        with pytest.raises(UsageError, match=r"has .* samples of its group, .*: keep samples in the first dimension"):
            model(torch.ones(2, 5, 4))


def test_plans_that_differ_are_an_error_of_all(group: World) -> None:
    for name, how in (("ab"[group.rank % 2], "column"), ("a", ["column", "row"][group.rank % 2])):
        if group.size > 1:
            with pytest.raises(MismatchError, match=rf"rank 0 has layer a split by column {group.size}, rank 1 has"):
                unisono.parallel(Heads(), group, plan={name: how})
    unisono.parallel(Heads(), group, plan=dict.fromkeys("ab" if group.rank else "ba", "column"))


def test_a_step_that_a_rank_leaves_out_is_an_error_of_all_where_it_changes_parts_alone(group: World) -> None:
    """A GradScaler leaves out that of a rank whose own part has infinite gradients."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 12))
    model[0].requires_grad_(False)
    optimizer = sgd(unisono.parallel(model, group, plan={"1": "column"}))
    for leaves_out in (None, group.size - 1):
        model(torch.ones(2, 4)).sum().backward()
        if group.rank != leaves_out:
            optimizer.step()
    if group.size > 1:
        with pytest.raises(UsageError, match=rf"were changed on .*, but not on rank {group.size - 1}, so ranks differ"):
            model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("scale", ["mean", "sum"])
def test_sums_and_norms_count_each_sample_and_part_once(group: World, scale: str) -> None:
    case, size = CASES["mlp"], sizes_of(group)[-1]
    model = unisono.parallel(
        model_of(case), group, unisono.BSP(scale=scale), plan=with_sizes(case.plans["whole"], size)
    ).eval()
    unsplit, (inputs, labels) = model_of(case).eval(), batch(case, 0)
    nn.functional.cross_entropy(unsplit(inputs), labels).backward()
    factor = group.size if scale == "sum" else 1
    nn.functional.cross_entropy(model(inputs), labels).backward()
    expected = float(nn.utils.get_total_norm([parameter.grad * factor for parameter in unsplit.parameters()]))
    assert clip_grad_norm(model, 0.1) == pytest.approx(expected, rel=1e-12)
    assert clip_grad_norm(model, 0.1) == pytest.approx(0.1, rel=1e-4)


def test_inference_mode_and_checkpointing_with_an_empty_share(group: World) -> None:
    """Recomputed layers exchange as often on a rank without samples as on the others."""
    case, absent = CASES["transformer"], group.size > 1 and group.rank == group.size - 1
    model = unisono.parallel(model_of(case), group, plan=case.plans["block"])
    inputs, _ = batch(case, 0)
    mine = inputs[:0] if absent else inputs
    seed_dropout(model, 3, 1, 0)
    model(mine).sum().backward()
    expected = [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    block, rest = model[0], model[1:]
    outputs = rest(checkpoint(block, mine, use_reentrant=False))
    with torch.no_grad():
        model(mine)  # draws other masks, and not those that are drawn again
    outputs.sum().backward()
    for parameter, before in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, before)
    with torch.inference_mode():
        assert len(model.eval()(mine + 1)) == len(mine)


def test_passes_without_gradients_have_masks_of_their_own_and_do_not_count(group: World) -> None:
    torch.manual_seed(0)
    layers = nn.Linear(8, 24), nn.Dropout(0.5), nn.Linear(24, 6)
    model = unisono.parallel(nn.Sequential(*layers), group, plan={"0": "column gives part", "2": "row takes part"})
    other, inputs = copy.deepcopy(model), torch.ones(3, 8)
    for _ in range(2):
        expected = other(inputs)
        with torch.no_grad():
            passes = [model(inputs) for _ in range(3)]
        assert torch.equal(model(inputs), expected)
        pairs = itertools.combinations([*passes, expected], 2)
        assert not any(torch.equal(first, second) for first, second in pairs)


def test_copies_compute_the_same_and_states_load(group: World) -> None:
    model = unisono.parallel(model_of(CASES["words"]), group, plan={"words": "row"})
    numbers = torch.arange(11).view(1, 11)
    before = model(numbers)
    assert torch.equal(copy.deepcopy(model)(numbers), before)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    plain = Words().double().state_dict()
    assert getattr(whole_state_dict(model), "_metadata", None) == (plain._metadata if group.rank == 0 else None)
    model.load_state_dict(plain)
    assert not torch.allclose(model(numbers), before)
    model.load_state_dict(state)
    assert torch.equal(model(numbers), before)
    with pytest.raises(IndexError, match=r"numbers 0 to 11 in 11 rows|out of range"):
        model(torch.tensor([[0, 11]]))


def test_a_fused_transformer_layer_is_not_taken_for_whole(group: World) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(12, 2, 24, batch_first=True).eval()
    x = torch.randn(2, 3, 12)
    expected = layer(x).detach()
    unisono.parallel(layer, group, plan={"linear1": "column gives part", "linear2": "row takes part"})
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("plan", [{"layers.*.self_attn": "heads"}, {"layers.1.linear1": "column"}])
def test_an_encoder_takes_padding_in_tests_as_whole_ones_do(group: World, plan: dict[str, str]) -> None:
    """PyTorch's own would make nested tensors of it, and read whole weights."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(24, 12, 24, batch_first=True)
    unsplit, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), torch.randn(2, 3, 24)
    padding = torch.tensor([[0, 0, 1], [0, 0, 0]]).bool()
    model = unisono.parallel(nn.TransformerEncoder(layer, 2), group, plan=plan).eval()
    model.load_state_dict(unsplit.state_dict())
    with torch.no_grad():
        kept = ~padding
        expected = unsplit(x, src_key_padding_mask=padding)
        torch.testing.assert_close(model(x, src_key_padding_mask=padding)[kept], expected[kept])


def test_an_encoder_that_is_not_split_makes_nested_tensors(group: World) -> None:
    """In tests, where its outputs at padding are zeros. Others of the model make none."""
    layer = nn.TransformerEncoderLayer(24, 12, 24, batch_first=True)
    model = nn.ModuleDict({"whole": nn.TransformerEncoder(layer, 2), "split": nn.TransformerEncoder(layer, 2)}).eval()
    unsplit, x = copy.deepcopy(model["whole"]), torch.randn(2, 3, 24)
    padding = torch.tensor([[0, 1, 1], [0, 0, 1]]).bool()
    split_model(model, group, {"split.layers.1.linear1": "column"})
    with torch.no_grad():
        outputs = model["whole"](x, src_key_padding_mask=padding)
        assert not outputs[padding].any()
        assert torch.equal(outputs, unsplit(x, src_key_padding_mask=padding))
    assert [each.use_nested_tensor for each in model.values()] == [True, group.size == 1]


class Attending(nn.Module):
    """Attention of 12 heads, with what its call is given."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(24, 12, batch_first=True)

    def forward(self, queries: torch.Tensor, keys: torch.Tensor, **given: Any) -> torch.Tensor:
        outputs: torch.Tensor = self.attention(queries, keys, keys, **given)[0]
        return outputs


@pytest.mark.parametrize("name", ["key_padding_mask", "attn_mask", "need_weights"])
def test_what_some_ranks_alone_give_an_attention_is_an_error_of_all(group: World, name: str) -> None:
    """A mask may have as many elements as the queries that the other ranks exchange. The next pass is exact."""
    unsplit = Attending()
    model = split_model(copy.deepcopy(unsplit), group, {"attention": "heads"})
    options = {"key_padding_mask": torch.zeros(2, 24).bool(), "attn_mask": torch.zeros(24, 1, 24), "need_weights": True}
    queries, keys, given = torch.randn(2, 1, 24), torch.randn(2, 24, 24), {"need_weights": False}
    if group.size > 1:
        with pytest.raises(MismatchError, match=r"ranks of a group are in exchanges .* masks or need_weights differ"):
            model(queries, keys, **given | ({name: options[name]} if group.rank == 0 else {}))
    torch.testing.assert_close(model(queries, keys, **given), unsplit(queries, keys, **given))


def test_an_attention_takes_a_batch(group: World) -> None:
    model = split_model(nn.ModuleDict({"a": nn.MultiheadAttention(24, 12, batch_first=True)}), group, {"a": "heads"})
    x = torch.zeros(3, 24)
    if group.size > 1:
        with pytest.raises(UsageError, match=r"takes \(samples, ...\), 3 dimensions or more, and got \(3, 24\)"):
            model["a"](x, x, x)
        with pytest.raises(UsageError, match="is_causal = True says what attn_mask is, and there is none: pass"):
            model["a"](x[None], x[None], x[None], is_causal=True)


def test_bfloat16_products(group: World) -> None:
    model = unisono.parallel(model_of(CASES["convnet"]).float(), group, plan={"4": "column", "8": "column"})
    inputs, labels = batch(CASES["convnet"], 0)
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(inputs.float()), labels)
    loss.backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


def refusals(group: World) -> Mapping[str, Any]:
    def again() -> None:
        model = unisono.parallel(model_of(CASES["mlp"]), group, plan={"0": "column"})
        model.extra = nn.Linear(2, 2)
        unisono.parallel(model, group, plan={"0": "column"})

    def muon() -> None:
        model = unisono.parallel(
            nn.Sequential(nn.Linear(12, 12, bias=False)), group, plan={"0": f"column {group.size}"}
        )
        Trainer(model, group, unisono.BSP(), torch.optim.Muon(model.parameters(), 0.1))

    return {
        "the model is split already: give the plan once": again,
        "Muon needs whole weights": muon,
        "LocalSGD does not take split layers: use BSP or Sharded, or no plan": lambda: unisono.parallel(
            (model := model_of(CASES["mlp"])), group, unisono.LocalSGD(), sgd(model), plan={"0": "column"}
        ),
        "plan = 'hybrid' is no plan": lambda: unisono.parallel(model_of(CASES["mlp"]), group, plan="hybrid"),
    }


def test_refusals(group: World) -> None:
    for message, act in refusals(group).items():
        if message.startswith("Muon") and group.size == 1:
            continue
        with pytest.raises(UsageError, match=message):
            act()


class OwnLARS(LARS):
    """Optimizer of a program, whose step a Trainer makes as a whole."""


class StepOfItsOwn(LARS):
    """Optimizer of a program, whose step may measure parts."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(parameter.grad, alpha=float(parameter.norm()))


class Lamb(torch.optim.SGD):
    """Optimizer of another package, which has its own norms."""


def _collect(*_: object) -> None:
    gc.collect()


def test_an_optimizer_made_after_the_split_is_refused_in_its_step(group: World) -> None:
    """Where it needs whole weights, and has parts of some; other models' and other steps are as before."""
    others = set(_global_optimizer_pre_hooks)
    model = unisono.parallel(nn.Sequential(nn.Linear(12, 12, bias=False)), group, plan={"0": "column"})
    hooks = _global_optimizer_pre_hooks.keys() - others
    model(torch.randn(2, 12)).sum().backward()
    before = model[0].weight.clone()
    for make in (StepOfItsOwn, Lamb, torch.optim.Adafactor, torch.optim.Muon):
        if group.size > 1:
            with pytest.raises(UsageError, match=rf"{make.__name__} needs whole weights, .*: use .*SGD, Adam"):
                make(model.parameters(), lr=0.1).step()
    assert torch.equal(model[0].weight, before)
    other = nn.Linear(2, 2)
    LARS(other.parameters(), 0.1).step()
    optimizer = sgd(model)
    assert not has_hooks(optimizer)
    torch.compile(optimizer.step, backend="eager")()
    assert not torch.equal(model[0].weight, before)
    collecting = [register_optimizer_step_pre_hook(hook) for hook in (_collect, lambda *_: None)]
    model.itself = [model]  # the collector alone frees it, while PyTorch goes through all hooks
    del model, optimizer
    LARS(other.parameters(), 0.1).step()
    for handle in collecting:
        handle.remove()
    unisono.parallel(nn.Sequential(nn.Linear(12, 12, bias=False)), group, plan={"0": "column"})
    assert len(hooks) == (group.size > 1)
    assert hooks.isdisjoint(_global_optimizer_pre_hooks)


def test_a_split_model_that_is_made_parallel_again_is_checked_once(group: World) -> None:
    others = set(_global_optimizer_pre_hooks)
    model = nn.Sequential(nn.Linear(12, 12, bias=False), nn.Linear(12, 12))
    unisono.parallel(model, group, plan={"0": "column"})
    model[1].requires_grad_(False)
    unisono.parallel(model, group)
    assert len(_global_optimizer_pre_hooks.keys() - others) == (group.size > 1)


def test_a_compiled_model_has_the_numbers_of_another(group: World) -> None:
    """Also a dropout between the two layers, and batches of different sizes."""
    trained = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Dropout(0.1), nn.Linear(12, 2)).double()
        unisono.parallel(model, group, plan={"0": "column gives part", "3": "row takes part"})
        optimizer = sgd(model)
        run = torch.compile(model, backend="aot_eager") if compiled else model
        for step, samples in enumerate((4, 3, 5)):
            optimizer.zero_grad()
            seed_dropout(model, 0, step)
            run(torch.randn(samples, 4, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
        trained.append([parameter.detach() for parameter in model.parameters()])
    torch.testing.assert_close(*trained, rtol=0, atol=1e-12)
