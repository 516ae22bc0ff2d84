"""Recipes that cannot run are refused before any rank is started."""

from pathlib import Path

import numpy as np
import pytest
import tomli_w

from unisono.data.kinds import RAW
from unisono.data.options import DataOptions
from unisono.data.pack.packing import PackOptions, pack
from unisono.data.sources import Source
from unisono.errors import PackError, RecipeError, UsageError
from unisono.training.recipe import Recipe, differences, read_recipe, to_dict
from unisono.training.recipe_check import check_run, describe_unused_data, plan_of

RECIPES = Path(__file__).parents[2] / "src" / "unisono" / "recipes"
DIGITS = RECIPES / "digits.toml"
DOCS = Path(__file__).parents[2] / "docs" / "training.md"


def test_what_cannot_run_is_known_before_a_rank_is_started() -> None:
    check_run(read_recipe(DIGITS), 64)
    for changes, ranks, message in (
        ([], 65, "65 ranks share batches of 64 samples"),
        (["training.batch=1438"], 1, "digits has 1437 samples"),
        (["data.name=mnist"], 1, "data.name = 'mnist'; there are digits"),
        (
            ["data.storage=replicated", "data.groups=2"],
            2,
            'data: groups = 2, but storage = "replicated": only "partitioned" takes groups',
        ),
        (["data.shuffle=weekly"], 2, 'data.shuffle = "weekly"; it is "epoch", "every:N" or "once"'),
        (
            ["data.shuffle='every:2,parts:65'", "training.batch=64"],
            2,
            "data.shuffle has 65 parts, but training.batch = 64",
        ),
        (["data.shuffle=once", "rule.name=easgd"], 2, 'data.shuffle = "once", but workers of rule.name = "easgd" have'),
        (["data.storage=auto", "data.groups=2"], 2, 'groups = 2, but storage = "auto": only'),
        (["model.name=vgg"], 1, "model.name = 'vgg'; there are small_convnet"),
        (["model.name=nowhere:wide"], 1, "model.name = 'nowhere:wide': there is no module nowhere in"),
        (["model.name=nowhere:"], 1, "a network is named module:function"),
        (["exchange.algorithm=rong"], 1, "no schedule 'rong'"),
        (["rule.name=easgd"], 1, r"EASGD\(server='rank', servers=1\): .*, and 1 rank is too few: start 2 or more"),
        (["rule.name=easgd", "rule.servers=2"], 2, "beside workers, and 2 ranks are too few: start 3 or more"),
        (["rule.name=easgd", "rule.servers=2", "rule.server=thread"], 1, "1 rank is too few: start 2 or more"),
        (["rule.name=easgd", "rule.staleness=1"], 4, "already have a staleness of 2: raise it to that or more"),
        (["optimizer.nesterov=true", "optimizer.momentum=0"], 1, "it needs sgd with a momentum above 0"),
        (["optimizer.nesterov=true", "optimizer.name=lars"], 1, "optimizer.name = 'lars' and"),
        (["optimizer.nesterov=1"], 1, "optimizer.nesterov = 1 is not true or false"),
        (["optimizer.name=lamb", "optimizer.momentum=1"], 1, "momentum = 1.0: it is the first beta of lamb, and below"),
        (
            ["optimizer.policy=steps", "optimizer.every=0.001", "optimizer.decay=10"],
            1,
            "decay = 10.0, every 0.001 of 15 epochs: the learning rate is beyond all numbers",
        ),
        (["optimizer.policy=steps", "optimizer.every=1e-310"], 1, "lower optimizer.decay, or raise optimizer.every"),
        (["compute.threads=9999999"], 1, "compute.threads = 9999999, but it has to be at most 1024"),
        (["compute.device='no device'"], 1, 'compute.device = \'no device\'; there are "auto", "cpu" and the kinds'),
        (["training.virtual_ranks=4"], 8, "virtual_ranks = 4, but 8 ranks: some would have no share; start at most 4"),
        (["training.virtual_ranks=7"], 2, "virtual_ranks = 7 does not divide training.batch = 64: shares have equally"),
        (
            ["training.virtual_ranks=8"],
            2,
            'needs the same algorithms in each run: set compute.convolutions = "library"',
        ),
        (["training.virtual_ranks=8", "exchange.wire=int8"], 2, 'wire = "int8" depend on the ranks: use "exact"'),
        (["training.virtual_ranks=8", "rule.name=diloco"], 2, 'rule.name = "diloco" does not sum by the wire "exact"'),
        (["exchange.wire=exact", "parallel.layers.3=column"], 2, r"\[parallel\] splits layers, which do not sum by"),
        (["exchange.wire=float8"], 1, "exchange.wire = 'float8'; there are own, float32, float16, bfloat16"),
    ):
        with pytest.raises(UsageError, match=message):
            check_run(read_recipe(DIGITS, changes), ranks)


def test_of_a_pack_it_is_known_too(tmp_path: Path) -> None:
    changes = [f"data.pack={tmp_path / 'data'}", "data.name=whatever", "training.batch=20"]
    with pytest.raises(PackError, match="there is no such folder; create it with unisono pack SOURCE"):
        check_run(read_recipe(DIGITS, changes), 2)
    labels, sizes = np.arange(20) % 2, np.full(20, 4)
    keys = [str(index) for index in range(20)]
    source = Source(RAW, ("a", "b"), keys, labels, sizes, lambda index: bytes([index] * 4), (2, 2))
    pack(source, tmp_path / "data/train", PackOptions(stripes=1), 1, lambda: None)
    check_run(read_recipe(DIGITS, changes), 20)
    with pytest.raises(RecipeError, match=r"training\.batch = 21, but .*data has 20 samples to train on"):
        check_run(read_recipe(DIGITS, [*changes, "training.batch=21"]), 2)


def test_a_rule_is_one_of_the_table_or_ones_own(tmp_path: Path) -> None:
    from unisono.rules import RULES

    for name in RULES:
        check_run(read_recipe(DIGITS, [f"rule.name={name}"]), 2)
    with pytest.raises(
        RecipeError,
        match=rf"rule.name = 'easy'; there are {', '.join(RULES)}, or module:function of your",
    ):
        check_run(read_recipe(DIGITS, ["rule.name=easy"]), 1)
    (tmp_path / "mine.toml").write_text('[rule]\nname = "own_rules_here:make"\n')
    recipe = read_recipe(tmp_path / "mine.toml")
    assert recipe.rule.folder == str(tmp_path)
    with pytest.raises(RecipeError, match=r"rule.name = 'own_rules_here:make': there is no module own_rules_here in"):
        check_run(recipe, 1)
    (tmp_path / "own_rules_here.py").write_text("raise SystemExit('it is not run')")
    check_run(recipe, 1)


def test_layers_that_are_split(tmp_path: Path) -> None:
    text = '[parallel]\nranks = 2\n[parallel.layers]\n"classifier.1" = "column gives part"\n'
    (tmp_path / "split.toml").write_text(text)
    recipe = read_recipe(tmp_path / "split.toml", ["parallel.layers.classifier.3=row takes part"])
    assert recipe.parallel.layers == {"classifier.1": "column gives part", "classifier.3": "row takes part"}
    (tmp_path / "copy.toml").write_text(tomli_w.dumps(to_dict(recipe)))
    assert read_recipe(tmp_path / "copy.toml") == recipe
    assert differences(recipe, Recipe()) == [
        "parallel.ranks",
        "parallel.layers.classifier.1",
        "parallel.layers.classifier.3",
    ]
    check_run(recipe, 4)
    for ranks, changes, message in (
        (
            3,
            [],
            "parallel.layers are split over groups of 2 ranks, which do not divide 3 ranks: start a multiple of 2",
        ),
        (
            2,
            ["rule.name=local_sgd"],
            r"rule.name = 'local_sgd' does not take the split layers of \[parallel\]: use bsp or sharded",
        ),
        (2, ["parallel.layers.a=diagonal"], "the plan of layer 'a' is 'diagonal'; it reads like"),
        (
            64 + 2,
            ["training.batch=64"],
            "66 ranks share batches of 64 samples, so some would have none; start at most 64",
        ),
    ):
        with pytest.raises(UsageError, match=message):
            check_run(read_recipe(tmp_path / "split.toml", changes), ranks)
    with pytest.raises(RecipeError, match=r"parallel.layers.a = 2 is not a string"):
        read_recipe(tmp_path / "split.toml", ["parallel.layers.a=2"])
    with pytest.raises(RecipeError, match=r'parallel.layers is a table of keys or "auto", not the value 2'):
        read_recipe(tmp_path / "split.toml", ["parallel.layers=2"])


def test_layers_that_are_left_to_a_prediction(tmp_path: Path) -> None:
    (tmp_path / "auto.toml").write_text('[parallel]\nlayers = "auto"\n')
    recipe = read_recipe(tmp_path / "auto.toml")
    assert recipe.parallel.layers == "auto"
    assert plan_of(recipe, 4) is None
    assert plan_of(Recipe(), 4) is None
    (tmp_path / "copy.toml").write_text(tomli_w.dumps(to_dict(recipe)))
    assert read_recipe(tmp_path / "copy.toml") == recipe
    assert differences(recipe, Recipe()) == ["parallel.layers"]
    for rule in ("bsp", "local_sgd"):
        check_run(read_recipe(tmp_path / "auto.toml", [f"rule.name={rule}"]), 3)
    with pytest.raises(RecipeError, match=r'parallel.layers is a table of keys or "auto", not the value \'hybrid\''):
        read_recipe(tmp_path / "auto.toml", ["parallel.layers=hybrid"])


def test_keys_of_a_pack_without_one_are_told() -> None:
    assert describe_unused_data(DataOptions(shuffle="once")) == []
    assert describe_unused_data(DataOptions(pack="pets", augment="shift", size=32)) == []
    assert describe_unused_data(DataOptions(augment="shift", size=32)) == [
        "data.size = 32 has no effect with data.name = 'digits': it is for a data.pack",
        "data.augment = 'shift' has no effect with data.name = 'digits': it is for a data.pack",
    ]
