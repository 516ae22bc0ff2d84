from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from unisono.data.pack.packing import PackOptions, pack
from unisono.data.sources import find
from unisono.errors import RecipeError, UsageError
from unisono.plan.loading import MAX_DECODING_THREADS, SampleFacts
from unisono.plan.machines import find_machine
from unisono.plan.trace import trace
from unisono.plan.wall_time import Job
from unisono.rules import BSP, DiLoCo, Exchange, LocalSGD, Sharded
from unisono.training.planned_run import (
    PlannedData,
    changed,
    data_of,
    example_of,
    network_of,
    planned_run,
    rule_of,
    settings_of,
    with_rules,
)
from unisono.training.recipe import DataRecipe


def test_the_run_of_a_recipe_has_its_batch_rule_and_optimizer() -> None:
    run = planned_run(Path("digits_local_sgd"), None, None)
    (rule,) = run.rules.values()
    assert isinstance(rule, LocalSGD)
    assert (run.name, run.optimizer, run.minibatch) == ("small_convnet", "sgd", 64)
    assert planned_run(Path("digits"), None, 128).minibatch == 128


def test_the_run_of_a_network_averages_gradients() -> None:
    run = planned_run(None, "vgg_a", 256)
    assert (run.rules, run.optimizer, run.momentum) == ({"bsp": BSP()}, "sgd", 0.9)
    with pytest.raises(UsageError, match="--minibatch is missing"):
        planned_run(None, "vgg_a", None)


def test_the_run_of_a_recipe_has_its_data_its_job_and_its_split_layers(tmp_path: Path) -> None:
    (tmp_path / "wide.toml").write_text('[training]\nepochs = 3\n[parallel]\nlayers = "auto"\n')
    run = planned_run(tmp_path / "wide.toml", None, None)
    assert run.parallel.layers == "auto"
    assert (run.data.train, run.data.test, run.data.classes) == (1437, 360, 10)
    assert run.job == Job(3, 360, 0, autotunes=True)
    assert settings_of(run, (1,), 1, 2).epoch_samples == 1437
    assert not planned_run(None, "vgg_a", 256).parallel.layers


def test_a_wire_keeps_the_rule_and_rules_keep_the_exchange() -> None:
    run = planned_run(Path("digits_local_sgd"), None, None)
    (rule,) = with_rules(run, None, "bfloat16").rules.values()
    assert isinstance(rule, LocalSGD)
    assert rule.exchange == Exchange(wire="bfloat16")
    both = with_rules(with_rules(run, None, "int8"), "bsp,local_sgd:4", None)
    assert both.rules == {"bsp": BSP(Exchange(wire="int8")), "local_sgd:4": LocalSGD(Exchange(wire="int8"), every=4)}
    assert with_rules(run, None, None) == run


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("bsp", BSP()),
        ("sharded", Sharded()),
        ("local_sgd:16", LocalSGD(every=16)),
        ("diloco:32", DiLoCo(every=32)),
    ],
)
def test_rules_by_their_words(words: str, rule: object) -> None:
    assert rule_of(words, Exchange()) == rule


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("bps", "there is no rule 'bps'; there are bsp, "),
        ("bsp:4", "--rule bsp:4: a number of steps"),
        ("local_sgd:auto", "--rule local_sgd:auto: a number of steps"),
        ("local_sgd:0", "every must be 1 or more"),
    ],
)
def test_other_words_are_refused(words: str, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        rule_of(words, Exchange())


def test_settings_are_those_of_the_optimizer() -> None:
    run = planned_run(Path("digits"), None, None)
    assert settings_of(run, (1, 2), 4, 2).kept == 1
    assert not settings_of(run, (1, 2), 4, 2).layer_norms
    slow = settings_of(replace(run, slow_nodes={1: 2.0}, simulated=True), (1, 2), 4, 2)
    assert (slow.slow_nodes, slow.simulated) == ({1: 2.0}, True)


def test_a_network_takes_no_memory_for_weights() -> None:
    network = network_of(planned_run(None, "small_convnet", 4), (1, 8, 8), 10)
    assert sum(one.numel() for one in network.parameters()) > 1000
    assert all(one.is_meta for one in network.parameters())
    example = example_of(network, (1, 8, 8), 2)
    assert (example.shape, example.dtype, example.is_meta) == ((2, 1, 8, 8), torch.float32, True)


def test_a_network_that_begins_with_an_embedding_gets_tokens() -> None:
    network = network_of(planned_run(None, "gpt_small", 4), (16,), 256)
    example = example_of(network, (16,), 2)
    assert (example.shape, example.dtype) == ((2, 16), torch.int64)
    attention = next(layer for layer in trace(network, example) if layer.name == "h.0.attn")
    assert attention.forward_flops == 2 * 2 * 2 * 16 * 16 * 128  # two products, masked places included


def test_a_data_set_of_the_package_is_decoded_already() -> None:
    assert data_of(DataRecipe()) == PlannedData(SampleFacts(threads=MAX_DECODING_THREADS), 1437, 360, 10)
    with pytest.raises(RecipeError, match=r"data\.name = 'digit'; there are digits"):
        data_of(DataRecipe(name="digit"))


def test_a_pack_has_its_samples_bytes_and_pixels(image_samples: Callable[..., Path], tmp_path: Path) -> None:
    for name, count in (("train", 6), ("test", 2)):
        part = find(image_samples(tmp_path / "source" / name, count=count))[""]
        pack(part, tmp_path / "pack" / name, PackOptions(stripes=2), 1, lambda: None)
    files = sorted((tmp_path / "source" / "train").rglob("*.jpg"))
    found = data_of(DataRecipe(pack=str(tmp_path / "pack"), threads=3, groups=2))
    nbytes = sum(path.stat().st_size for path in files) / 12
    assert found == PlannedData(SampleFacts(nbytes, 40 * 32, 3, copies=2), 12, 4, 2)


def test_of_a_pack_that_is_elsewhere_only_its_form_is_known() -> None:
    found = data_of(DataRecipe(pack="packs/nowhere", storage="replicated"))
    assert found == PlannedData(SampleFacts(copies=0))


RUN, MACHINE = planned_run(None, "small_convnet", 64), find_machine("taihulight")


def test_each_change_is_of_one_thing() -> None:
    wire, same = changed(RUN, MACHINE, "wire=bfloat16")
    assert (wire.rules, same) == ({"bsp": BSP(Exchange(wire="bfloat16"))}, MACHINE)
    rule, same = changed(RUN, MACHINE, "rule=local_sgd:16")
    assert (rule.rules, same) == ({"local_sgd:16": LocalSGD(every=16)}, MACHINE)
    run, faster = changed(RUN, MACHINE, "bandwidth=2x")
    assert (run, faster.link.bandwidth) == (RUN, 2 * MACHINE.link.bandwidth)


def test_changes_are_made_together() -> None:
    run, machine = changed(RUN, MACHINE, "wire=int8,rule=local_sgd:16,bandwidth=2x,latency=0.5x")
    assert run.rules == {"local_sgd:16": LocalSGD(Exchange(wire="int8"), every=16)}
    assert machine.name.endswith("bandwidth=2x, latency=0.5x")
    assert changed(with_rules(RUN, "bsp,sharded", None), MACHINE, "wire=int8")[0].rules.keys() == {"bsp", "sharded"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("wire=float9", "--what-if wire=float9: there is no wire 'float9'; there are float32, "),
        ("rule=bps", "there is no rule 'bps'"),
        ("nodes=2", "give a factor above 0 for bandwidth, .* or wire=bfloat16 or rule=local_sgd:16"),
        ("bandwidth=2x,", "give a factor above 0"),
    ],
)
def test_words_that_are_no_change_are_refused(words: str, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        changed(RUN, MACHINE, words)
