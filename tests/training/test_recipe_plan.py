"""Runs of recipes as they are planned: their data, their rules, their split layers, and changes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.plan.test_split import FAST, SLOW
from torch import nn

from unisono.data.options import DataOptions
from unisono.data.pack.packing import PackOptions, pack
from unisono.data.sources import find
from unisono.errors import RecipeError, UsageError
from unisono.placement import one_rank_per_node, place
from unisono.plan.layer_plan import Split, make_plan
from unisono.plan.loading import MAX_DECODING_THREADS, SampleFacts
from unisono.plan.machines import NetworkRow, ProductRow, find_machine
from unisono.plan.planned_run import PlannedRun
from unisono.plan.run_plan import RunPlan, plan_run, predict_run
from unisono.plan.run_report import layers_of
from unisono.plan.split import GroupLinks, LinkCosts, SplitModel, choose_splits
from unisono.plan.trace import trace
from unisono.rules import BSP, Exchange, LocalSGD
from unisono.step.costs import Cost
from unisono.tensor_parallel.choose_plan import inputs_of, split_model_of
from unisono.training.recipe import ParallelRecipe, find_recipe, read_recipe
from unisono.training.recipe_check import make_rule
from unisono.training.recipe_plan import (
    SampleRecipe,
    example_of,
    plan_recipe,
    planned_run,
    run_on_ranks,
    sample_shape,
    samples_of,
    traced_network,
    what_if,
)

MACHINE = find_machine("aws_c4_8xlarge")
DEEP = plan_recipe(None, "cd_dnn", ["training.batch=256", "samples.train=2560"])
NETWORK, TRACED = traced_network("cd_dnn", "", (440,), 1000)
NAMES = [name for name, module in NETWORK.named_modules() if type(module) is nn.Linear]


def run_of(*changes: str) -> PlannedRun:
    return planned_run(plan_recipe(Path("digits"), None, changes), MACHINE, 2)


def planned(**changes: Any) -> tuple[PlannedRun, list[RunPlan]]:
    run = planned_run(replace(DEEP, **changes), MACHINE, 4)
    return run, plan_run(run, (1, 4))


@cache
def planned_by(rule: str) -> tuple[PlannedRun, list[RunPlan]]:
    return planned(rule=replace(DEEP.rule, name=rule))


def model_of(layers: Mapping[str, str] | str = "", ranks: int = 0) -> SplitModel:
    return split_model_of(layers or {}, ranks, BSP(), NETWORK, TRACED)


def splits_of(model: SplitModel, cost: Cost = SLOW) -> dict[str, str]:
    """Splits in words."""
    facts, splits = model(4)
    timed = tuple(replace(layer, forward_seconds=1e-3, backward_seconds=2e-3) for layer in facts)
    links = GroupLinks(one_rank_per_node(4), *[LinkCosts(cost, cost)] * 2)
    chosen = choose_splits(inputs_of(timed, 256 / 4 / 2, links))
    return {name: str(split) for name, split in (chosen.splits if splits is None else splits).items()}


def test_the_run_of_a_recipe_has_its_batch_data_and_optimizer() -> None:
    run = run_of("training.epochs=3", "training.checkpoint_every=7", "training.checkpoint_minutes=5")
    assert (run.checkpoint_minutes, run.virtual_ranks) == (5, 0)
    assert (run.rule, run.rule_name, run.minibatch, run.kept, run.layer_norms) == (BSP(), "bsp", 64, 1, False)
    assert (run.epoch_samples, run.test_samples, run.epochs, run.checkpoint_every) == (1437, 360, 3, 7)
    assert (run.traced, run.nodes, run.ranks, run.samples_of_rank) == (2, 2, 2, 32)
    assert run.autotunes
    other = run_of("optimizer.name=lamb", "optimizer.clip=1.5", "compute.convolutions=library")
    assert (other.kept, other.layer_norms, other.clip, other.autotunes) == (2, True, 1.5, False)


def test_samples_that_are_given_go_before_those_of_the_data() -> None:
    given = ("samples.train=9000", "samples.test=5", "samples.bytes=100", "samples.pixels=64", "data.storage=streamed")
    run = run_of(*given)
    assert (run.epoch_samples, run.test_samples) == (9000, 5)
    assert (run.samples.nbytes, run.samples.pixels, run.samples.from_disk) == (100, 64, True)
    assert run_of("samples.classes=20").layers[-1].parameters == 2 * run.layers[-1].parameters
    assert plan_run(run_of(), (2,))[0].epoch == pytest.approx(23 * plan_run(run_of(), (2,))[0].step)


def test_the_run_of_a_network_has_no_data() -> None:
    run = planned_run(plan_recipe(None, "vgg_a"), MACHINE, 1)
    assert (run.epoch_samples, run.samples.pixels, run.minibatch, run.rule) == (None, 0, 64, BSP())
    for path, model in ((None, None), (Path("digits"), "vgg_a")):
        with pytest.raises(UsageError, match="give a recipe or --model NAME, one of them"):
            plan_recipe(path, model)
    with pytest.raises(RecipeError, match=r"unknown key samples.trian; did you mean samples.train\?"):
        plan_recipe(None, "vgg_a", ["samples.trian=5"])


def test_changes_are_of_the_recipe_or_the_machine_and_made_together() -> None:
    recipe, machine = what_if(DEEP, MACHINE, "exchange.wire=int8,rule.name=local_sgd,bandwidth=2x,latency=0.5x")
    assert make_rule(recipe) == LocalSGD(Exchange(wire="int8"))
    assert (recipe.training, recipe.samples) == (DEEP.training, DEEP.samples)
    assert machine.link.bandwidth == 2 * MACHINE.link.bandwidth
    assert machine.name.endswith("bandwidth=2x, latency=0.5x")
    assert what_if(DEEP, MACHINE, "training.batch=512")[1] == MACHINE


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("rule.nmae=bsp", r"unknown key rule.nmae; did you mean rule.name\?"),
        ("nodes=2", "give a factor above 0 for bandwidth, .* or a key of the recipe, as in exchange.wire=bfloat16"),
        ("bandwidth=2x,", "give a factor above 0"),
    ],
)
def test_other_words_are_refused(change: str, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        what_if(DEEP, MACHINE, change)


def test_the_shape_of_a_sample() -> None:
    assert sample_shape("") == ()
    assert sample_shape("3x224x192") == (3, 224, 192)
    for shape in ("3x", "0x3", "3*3"):
        with pytest.raises(UsageError, match="give the shape of a sample"):
            sample_shape(shape)
    with pytest.raises(UsageError, match="has 27,000,000,000 numbers: the limit is 1,000,000,000"):
        sample_shape(f"3x{10**9}x9")


def test_a_network_takes_no_memory_for_weights_and_the_random_numbers_stay() -> None:
    before = torch.random.get_rng_state()
    network, _ = traced_network("small_convnet", "", (1, 8, 8), 10)
    assert sum(weight.numel() for weight in network.parameters()) > 1000
    assert all(weight.is_meta for weight in network.parameters())
    assert torch.equal(before, torch.random.get_rng_state())
    example = example_of(network, (1, 8, 8), 2)
    assert (example.shape, example.dtype, example.is_meta) == ((2, 1, 8, 8), torch.float32, True)


def test_a_network_that_begins_with_an_embedding_gets_tokens() -> None:
    network, _ = traced_network("gpt_small", "", (16,), 256)
    example = example_of(network, (16,), 2)
    assert (example.shape, example.dtype) == ((2, 16), torch.int64)
    attention = next(layer for layer in trace(network, example).layers if layer.name == "h.0.attn")
    assert attention.forward_flops == 2 * 2 * 2 * 16 * 16 * 128  # two products, masked places included


def test_split_layers_have_a_row_where_they_are_faster() -> None:
    for rule in ("bsp", "sharded"):
        _, rows = planned_by(rule)
        assert [(row.rule, row.nodes) for row in rows] == [(rule, 1), (rule, 4), (f"{rule} + split layers", 4)]
        _, unsplit, split = rows
        assert split.step < unsplit.step / 1.1
        assert split.split
        assert split.memory.weights < unsplit.memory.weights


def test_layers_add_up_to_the_row() -> None:
    run, rows = planned_by("bsp")
    for row in (rows[0], rows[-1]):  # the last one is that with splits
        layers = layers_of(replace(run, nodes=row.nodes), row.split)
        assert sum(layer.computing for layer in layers) == pytest.approx(row.computing)
        assert sum(layer.gradients + layer.activations for layer in layers) == pytest.approx(
            row.communicating, rel=0.01
        )
        assert (
            make_plan({layer.name: layer.parallelism for layer in layers if layer.parallelism != "data"}).splits
            == row.split
        )


@pytest.mark.parametrize(("rule", "share"), [("bsp", 0.5), ("sharded", 0.75), ("local_sgd", 0.5)])
def test_layers_have_the_wire_and_the_period_of_the_row(rule: str, share: float) -> None:
    recipe = replace(DEEP, rule=replace(DEEP.rule, name=rule))
    wide, narrow = (
        planned_run(replace(recipe, exchange=replace(DEEP.exchange, wire=wire)), MACHINE, 4)
        for wire in ("float32", "bfloat16")
    )
    row, _, _ = predict_run(narrow)
    assert sum(layer.gradients for layer in layers_of(narrow, {})) == pytest.approx(row.communicating, rel=0.02)
    for exact, encoded in zip(layers_of(wide, {}), layers_of(narrow, {}), strict=True):
        assert exact.sent == pytest.approx(1.5 * exact.weights / wide.rule.traits.period)  # 2 (p - 1) / p
        assert encoded.sent == pytest.approx(share * exact.sent)


def test_the_layers_of_a_recipe_are_whole_on_one_rank() -> None:
    _, rows = planned(parallel=ParallelRecipe(2, {"layers.2": "column"}))
    assert [row.split for row in rows] == [{}, {}, {"layers.2": Split("column", 2)}]


def test_facts_are_those_of_the_traced_layers() -> None:
    facts, _ = model_of()(4)
    assert sum(layer.parameter_bytes for layer in facts) == sum(layer.parameter_bytes for layer in TRACED.layers)
    assert [layer.name for layer in facts if layer.splits] == NAMES


def test_layers_are_chosen_by_prediction_where_a_recipe_names_none() -> None:
    model = model_of()
    assert splits_of(model)
    assert not splits_of(model, FAST)


def test_a_recipes_layers_are_split_as_it_says() -> None:
    splits = {NAMES[1]: "column 2 gives part", NAMES[2]: "row 2 takes part", NAMES[4]: "row 4 gives part"}
    splits[NAMES[5]] = "column 4 takes part"
    model = model_of(splits)
    assert splits_of(model) == splits
    single = model_of({NAMES[1]: "column"})
    assert splits_of(single) == {NAMES[1]: "column 4"}
    pair = model_of({NAMES[1]: "column gives part", NAMES[2]: "row takes part"}, 2)
    assert splits_of(pair) == {NAMES[1]: "column 2 gives part", NAMES[2]: "row 2 takes part"}


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"0": "column 3"}, "groups of 3 do not divide 4 ranks"),
        ({"0": "column 4 gives part"}, "part"),
        ({"nowhere": "column"}, "which the model does not have"),
    ],
)
def test_splits_that_cannot_be_planned(layers: Mapping[str, str], message: str) -> None:
    model = model_of({NAMES[int(at)] if at.isdecimal() else at: how for at, how in layers.items()})
    with pytest.raises(UsageError, match=message) as caught:
        splits_of(model)
    assert "\n" not in str(caught.value)


def test_nothing_is_split_where_weights_have_to_be_whole() -> None:
    model = split_model_of({}, 0, LocalSGD(), NETWORK, TRACED)
    assert not splits_of(model)
    with pytest.raises(UsageError, match=r"\[parallel\] names layers, but LocalSGD does not "):
        split_model_of({"fc": "column"}, 2, LocalSGD(), NETWORK, TRACED)


def test_a_data_set_of_the_package_is_decoded_already() -> None:
    assert samples_of(DataOptions()) == SampleRecipe("1x8x8", 10, 1437, 360)
    assert run_of().samples == SampleFacts(threads=MAX_DECODING_THREADS)
    with pytest.raises(RecipeError, match=r"data\.name = 'digit'; there are digits"):
        samples_of(DataOptions(name="digit"))


def test_a_pack_has_its_samples_bytes_and_pixels(image_samples: Callable[..., Path], tmp_path: Path) -> None:
    for name, count in (("train", 6), ("test", 2)):
        part = find(image_samples(tmp_path / "source" / name, count=count))[""]
        pack(part, tmp_path / "pack" / name, PackOptions(stripes=2), 1, lambda: None)
    files = sorted((tmp_path / "source" / "train").rglob("*.jpg"))
    samples = samples_of(DataOptions(pack=str(tmp_path / "pack"), size=24, threads=3, groups=2))
    nbytes = round(sum(path.stat().st_size for path in files) / 12)
    assert samples == SampleRecipe("3x24x24", 2, 12, 4, nbytes, 40 * 32)


def inputs_of_first_layer(run: PlannedRun) -> tuple[int, ...]:
    return next(layer for layer in run.layers if layer.parameters).input_shapes[0][1:]


def test_a_network_is_traced_on_samples_of_the_data() -> None:
    """Of recordings also where the pack is elsewhere."""
    assert inputs_of_first_layer(run_of("model.name=resnet8")) == (1, 8, 8)
    recipe = plan_recipe(Path("spoken_digits"), None)
    assert inputs_of_first_layer(planned_run(recipe, MACHINE, 1)) == (4, 1000)
    alone = plan_recipe(Path("spoken_digits"), None, ["samples.shape=360"])
    assert inputs_of_first_layer(planned_run(alone, MACHINE, 1)) == (360,)
    known = run_on_ranks(
        read_recipe(find_recipe(Path("spoken_digits"))), SampleRecipe("4x1000", 10), MACHINE, one_rank_per_node(2)
    )
    assert inputs_of_first_layer(known) == (4, 1000)


def test_number_format_and_threads_of_a_recipe_count_and_what_does_not_has_a_line() -> None:
    virtual = ("training.virtual_ranks=4", "compute.convolutions=library")
    plain, wide, alone, two = run_of(), run_of("model.dtype=float64"), run_of(*virtual), run_of("compute.threads=2")
    assert wide.layers[-1].gradient_bytes == 2 * plain.layers[-1].gradient_bytes
    flops = plain.machine.node.flops
    assert alone.virtual_ranks == 4
    assert (alone.machine.node.flops, two.machine.node.flops) == pytest.approx((flops / 18, flops / 9))
    assert run_of("compute.threads=40").machine.node.flops == flops
    audited = run_of(*virtual, "audit.fraction=0.25")
    assert [run.notes for run in (plain, wide, alone)] == [
        (),
        ("not in these numbers: products in float64, about half as fast, and fewer bits of wires",),
        ("computing: 1 x 1 of 18 cores of a node, 6% of its speed",),
    ]
    assert audited.notes[1:] == ("not in these numbers: hashes of [audit], 25% of computing again",)
    minsky = find_machine("minsky_p100")
    (line,) = planned_run(plan_recipe(None, "resnet50", ["compute.threads=2"]), minsky, 2).notes
    assert line == "computing: on the accelerators, which a run takes with --set compute.device=auto"
    assert not planned_run(plan_recipe(None, "resnet50", ["compute.device=auto"]), minsky, 2).notes
    unknown = replace(MACHINE, node=replace(MACHINE.node, cores=0))
    (line,) = planned_run(plan_recipe(None, "cd_dnn", ["compute.threads=2"]), unknown, 1).notes
    assert line.startswith("not in these numbers: ranks of 2 threads")
    with pytest.raises(RecipeError, match="virtual_ranks = 4, but 8 ranks: some would have no share"):
        planned_run(plan_recipe(Path("digits"), None, virtual), MACHINE, 4, 2)
    with pytest.raises(RecipeError, match=r'virtual_ranks = 4, but rule.name = "local_sgd" does not sum by the wire'):
        run_of(*virtual, "rule.name=local_sgd")
    for run, splits in ((plain, None), (alone, {})):  # None: by prediction
        assert run.split is not None
        assert run.split(2)[1] == splits


def test_a_model_of_float64_has_the_products_in_float32() -> None:
    rows = tuple(ProductRow("linear", 8, 64, 10, 1, 1e11, 1e11, 0.0, dtype) for dtype in ("float32", "bfloat16"))
    probed = replace(MACHINE, products=rows)
    for changes, expected in ((), rows[1:]), (("model.dtype=float64",), rows[:1]):
        recipe = plan_recipe(Path("digits"), None, [*changes, "compute.device=auto"])
        assert [row.dtype for row in planned_run(recipe, probed, 1).machine.products] == [row.dtype for row in expected]


def test_streamed_data_have_a_part_in_memory_and_a_storage_that_is_chosen_has_a_line() -> None:
    streamed = ("data.storage=streamed", "data.cache_megabytes=1", "data.buffer_megabytes=2")
    facts = run_of(*streamed, "samples.train=4096", "samples.bytes=1024").samples
    assert (facts.from_disk, facts.cached, facts.buffers) == (True, 0.25, 4 << 20)
    assert run_of(*streamed, "samples.train=512", "samples.bytes=1024").samples.cached == 1
    assert run_of(*streamed).samples.cached == 0
    (line,) = run_of("data.storage=auto").notes
    assert line == "samples: planned as partitioned, a share in each rank; a run chooses by its memory"


def test_a_wire_without_effect_has_a_line_and_the_library_its_name() -> None:
    (line,) = run_of("exchange.wire=bfloat16", "exchange.algorithm=library").notes
    assert line == "exchange.wire = 'bfloat16' has no effect with exchange.algorithm = \"library\""
    assert not run_of("exchange.wire=bfloat16").notes
    alone, spread = plan_run(run_of("exchange.algorithm=library"), (1, 2))
    assert (alone.schedule, spread.schedule, spread.wire) == ("", "library", "float32")


def test_of_a_pack_that_is_elsewhere_only_its_form_is_known() -> None:
    assert samples_of(DataOptions(pack="packs/nowhere", storage="replicated")) == SampleRecipe()
    changes = ["data.pack=packs/nowhere", "data.threads=3", "data.groups=2", "samples.shape=1x8x8"]
    assert run_of(*changes).samples == SampleFacts(threads=3, copies=2)
    (line,) = run_of("data.pack=packs/nowhere", "model.name=resnet8").notes
    assert line.startswith(f"samples of 3x32x32, the network's own: {Path('packs/nowhere').absolute()} is not here")
    assert not run_of(*changes).notes
    assert run_of(*changes, "data.groups=1", "data.storage=replicated").samples.copies == 0


def test_a_run_on_ranks_is_that_of_a_plan_and_refuses_what_is_not_predicted() -> None:
    recipe, samples = read_recipe(find_recipe(Path("digits"))), SampleRecipe("1x8x8", 10, 1437)
    run = run_on_ranks(recipe, samples, MACHINE, place([0, 0, 1, 1]))
    assert (run.nodes, run.ranks_per_node, run.epoch_samples) == (2, 2, 1437)
    assert plan_run(run, (2,))[0].step == plan_run(replace(run_of(), ranks_per_node=2), (2,))[0].step
    with pytest.raises(UsageError, match="4 ranks do not spread evenly over 2 nodes"):
        run_on_ranks(recipe, samples, MACHINE, place([0, 0, 0, 1]))
    minsky, each = find_machine("minsky_p100"), place([0, 1])
    with pytest.raises(UsageError, match=r"1 rank on a node, an accelerator each, and a node of 4 P100, .* has 4"):
        run_on_ranks(recipe, samples, minsky, each)
    assert run_on_ranks(recipe, samples, minsky, place([0] * 4 + [1] * 4)).ranks == 8
    split = replace(recipe, parallel=ParallelRecipe(layers="auto"))
    with pytest.raises(UsageError, match="its layers are split over ranks, which a machine file does not predict"):
        run_on_ranks(split, samples, MACHINE, place([0, 0, 1, 1]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("training.batch=2000", "training.batch = 2000, but digits has 1437 samples to train on"),
        ("samples.train=63", "training.batch = 64, but digits has 63 samples to train on"),
        ("audit.fraction=5", "audit.fraction = 5.0: it is at most 1"),
        ("audit.fraction=0.5", r"\[audit\] needs the same bits on any ranks: set training.virtual_ranks"),
    ],
)
def test_what_a_run_refuses_is_not_planned(change: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        run_of(change)


def test_a_rate_of_an_unknown_network_is_refused() -> None:
    recipe, named = plan_recipe(Path("digits"), None), r"has a \[\[network\]\] named"
    for name, hint in (("alexnett", "did you mean alexnet"), ("mine", "there are small_convnet")):
        with pytest.raises(UsageError, match=rf"{named} '{name}', which is none; {hint}"):
            planned_run(recipe, replace(MACHINE, networks=(NetworkRow(name, 32, 100.0),)), 2)
    own = replace(MACHINE, networks=(NetworkRow("nets:mine", 32, 100.0),))
    assert planned_run(recipe, own, 2).machine.networks == ()


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ("[0][int(torch.zeros(1).item())]", "RuntimeError: Tensor"),
        ("{}['width']", "KeyError: 'width'"),
        ("classes / 0", "ZeroDivisionError: "),
    ],
)
def test_a_network_whose_weights_need_values_is_named(made: str, reason: str, tmp_path: Path) -> None:
    name = f"own_net_{reason.partition('Error')[0].lower()}"
    (tmp_path / f"{name}.py").write_text(f"import torch\ndef make(classes, channels):\n    return {made}\n")
    with pytest.raises(UsageError, match=f"'{name}:make' is not made without memory for its weights: {reason}"):
        traced_network(f"{name}:make", str(tmp_path), (1, 8, 8), 10)
