import dataclasses
from pathlib import Path

import numpy as np
import pytest
import tomli_w

from unisono.data.kinds import RAW
from unisono.data.pack.options import PackOptions
from unisono.data.pack.packing import pack
from unisono.data.sources.source import Source
from unisono.errors import PackError, RecipeError, UsageError
from unisono.models.names import NETWORKS
from unisono.training.packaged_recipes import find_recipe
from unisono.training.recipe import (
    Recipe,
    RuleRecipe,
    check_run,
    differences,
    parse_recipe,
    plan_of,
    read_recipe,
    to_dict,
)

RECIPES = Path(__file__).parents[2] / "src" / "unisono" / "recipes"
DIGITS = RECIPES / "digits.toml"
DOCS = Path(__file__).parents[2] / "docs" / "training.md"


def test_the_digits() -> None:
    recipe = read_recipe(DIGITS, ["training.epochs=3", "model.dtype=float64", "name = 'three words here'"])
    assert (recipe.ranks, recipe.training.epochs, recipe.model.dtype) == (2, 3, "float64")
    assert recipe.name == "three words here"
    assert recipe.training.batch == 64


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.name)
def test_every_recipe_is_understood(path: Path) -> None:
    recipe = read_recipe(path)
    assert recipe.name == path.stem
    assert recipe.model.name in NETWORKS
    assert recipe.training.batch >= recipe.ranks
    made = "unisono pack" in path.read_text()
    assert made == bool(recipe.data.pack), "it says how its pack is made"
    assert f"unisono train {path.stem}" in path.read_text()


def test_a_recipe_survives_toml(tmp_path: Path) -> None:
    recipe = read_recipe(DIGITS)
    (tmp_path / "copy.toml").write_text(tomli_w.dumps(to_dict(recipe)))
    assert read_recipe(tmp_path / "copy.toml") == recipe
    assert parse_recipe({}, "nothing") == Recipe()


def test_how_gradients_meet_is_found_by_measuring_unless_it_is_said() -> None:
    recipe = read_recipe(DIGITS)
    assert (recipe.rule.overlap, recipe.exchange.bucket_megabytes, recipe.optimizer.clip) == ("auto", 0, 0)
    reported = read_recipe(
        DIGITS,
        ["rule.overlap=none", "exchange.bucket_megabytes=0.25", "optimizer.clip=5", "optimizer.momentum=0"],
    )
    assert (reported.rule.overlap, reported.exchange.bucket_megabytes, reported.optimizer.clip) == ("none", 0.25, 5)
    assert read_recipe(DIGITS, ["exchange.bucket_megabytes=0", "optimizer.clip=0"]) == recipe


def test_differences_name_the_keys_but_not_the_ranks() -> None:
    other = read_recipe(DIGITS, ["training.epochs=3", "name=other", "ranks=4"])
    assert differences(read_recipe(DIGITS), other) == ["name", "training.epochs"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("training.epoch=3", "unknown key training.epoch; did you mean training.epochs?"),
        ("rank=3", "unknown key rank; did you mean ranks?"),
        ("zzz=3", "unknown key zzz; there are name, ranks, data"),
        ("training.epochs=0", "training.epochs = 0, but it has to be at least 1"),
        ("training.epochs=1.5", "training.epochs = 1.5 is not a whole number"),
        ("training.epochs=true", "training.epochs = True is not a whole number"),
        ("training.batch=-1", "training.batch = -1, but it has to be at least 1"),
        ("optimizer.learning_rate=0", "learning_rate = 0.0, but it has to be above 0"),
        ("optimizer.learning_rate=nan", "learning_rate = nan is out of range"),
        ("optimizer.clip=-1", "optimizer.clip = -1.0, but it has to be at least 0"),
        ("optimizer.name=adam", "optimizer.name = 'adam'; it is one of sgd, adamw, lars, lamb"),
        ("optimizer.policy=cosin", "optimizer.policy = 'cosin'; it is one of constant, steps, polynomial, cosine"),
        ("optimizer.warm_epochs=-1", "optimizer.warm_epochs = -1.0, but it has to be at least 0"),
        ("optimizer.decay=0", "optimizer.decay = 0.0, but it has to be above 0"),
        ("optimizer.for_batch=0.5", "optimizer.for_batch = 0.5 is not a whole number"),
        ("exchange.bucket_megabytes=-0.5", "bucket_megabytes = -0.5, but it has to be at least 0"),
        (
            "rule.overlap=tunnel",
            "rule.overlap = 'tunnel'; it is one of auto, chain, concurrent, funnel, none",
        ),
        ("rule.overlp=chain", "unknown key rule.overlp; did you mean rule.overlap?"),
        ("model.dtype=float16", "model.dtype = 'float16'; it is one of float32, float64"),
        ("training=3", "training is a table of keys, not the value 3"),
        ("data.storage=odd", "data.storage = 'odd'; it is one of partitioned, replicated, streamed, auto"),
        ("data.groups=0", "data.groups = 0, but it has to be at least 1"),
        ("data.size=-1", "data.size = -1, but it has to be at least 0"),
        ("data.size=32.5", "data.size = 32.5 is not a whole number"),
        ("data.windows=0", "data.windows = 0, but it has to be at least 1"),
        ("data.context=-1", "data.context = -1, but it has to be at least 0"),
        ("data.augment=rotate", "data.augment = 'rotate'; it is one of none, mirror, shift, scale, mask"),
        ("data.threads=-2", "data.threads = -2, but it has to be at least 0"),
        ("data.pack=7", "data.pack = 7 is not a string"),
        ("data.packs=here", "unknown key data.packs; did you mean data.pack?"),
        ("name.first=3", "'name' is a value, not a table"),
        ("epochs", "not of the form key=value"),
    ],
)
def test_a_bad_change_names_itself_and_the_nearest(change: str, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read_recipe(DIGITS, [change])
    assert words in str(caught.value)
    assert f"--set {change}" in str(caught.value)


def test_a_file_that_is_no_recipe(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("name = ")
    with pytest.raises(RecipeError, match=r"bad\.toml is not TOML"):
        read_recipe(path)
    with pytest.raises(RecipeError, match="No such file"):
        read_recipe(tmp_path / "none.toml")


def test_what_cannot_run_is_known_before_a_rank_is_started() -> None:
    check_run(read_recipe(DIGITS), 64)
    for changes, ranks, words in (
        ([], 65, "65 ranks share batches of 64 samples"),
        (["training.batch=1438"], 1, "digits has 1437 samples"),
        (["data.name=mnist"], 1, "data.name = 'mnist'; there are digits"),
        (
            ["data.storage=replicated", "data.groups=2"],
            2,
            'data.groups = 2, but data.storage = "replicated": only "partitioned" takes groups',
        ),
        (["data.shuffle=weekly"], 2, 'data.shuffle = "weekly"; it is "epoch", "every:N" or "once"'),
        (
            ["data.shuffle='every:2,parts:65'", "training.batch=64"],
            2,
            "data.shuffle has 65 parts, but training.batch = 64",
        ),
        (["data.shuffle=once", "rule.name=easgd"], 2, 'data.shuffle = "once", but workers of rule.name = "easgd" have'),
        (["data.storage=auto", "data.groups=2"], 2, 'data.groups = 2, but data.storage = "auto": only'),
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
        (["exchange.wire=float8"], 1, "exchange.wire = 'float8'; there are own, float32, float16, bfloat16"),
    ):
        with pytest.raises(UsageError, match=words):
            check_run(read_recipe(DIGITS, changes), ranks)


def test_of_a_pack_it_is_known_too(tmp_path: Path) -> None:
    changes = [f"data.pack={tmp_path / 'data'}", "data.name=whatever", "training.batch=20"]
    with pytest.raises(PackError, match="there is no such folder; create it with unisono pack SOURCE"):
        check_run(read_recipe(DIGITS, changes), 2)
    labels, sizes = np.arange(20) % 2, np.full(20, 4)
    keys = [str(number) for number in range(20)]
    source = Source(RAW, ("a", "b"), keys, labels, sizes, lambda number: bytes([number] * 4), (2, 2))
    pack(source, tmp_path / "data/train", PackOptions(stripes=1), 1, lambda: None)
    check_run(read_recipe(DIGITS, changes), 20)
    with pytest.raises(RecipeError, match=r"training\.batch = 21, but .*data has 20 samples to train on"):
        check_run(read_recipe(DIGITS, [*changes, "training.batch=21"]), 2)


def test_the_overlaps_are_those_of_step_programs() -> None:
    from unisono.step.overlaps import OVERLAPS

    for name in OVERLAPS:
        assert read_recipe(DIGITS, [f"rule.overlap={name}"]).rule.overlap == name
    choices = next(one for one in dataclasses.fields(RuleRecipe) if one.name == "overlap").metadata["one_of"]
    assert sorted(choices) == sorted(["auto", *OVERLAPS])


def test_a_network_of_ones_own_is_found_again_from_the_runs_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder is the recipe's, or beside it, and is kept whole."""
    (tmp_path / "recipes" / "nets").mkdir(parents=True)
    (tmp_path / "recipes" / "mine.toml").write_text('[model]\nname = "recipe_nets:wide"\n')
    monkeypatch.chdir(tmp_path)
    recipe = read_recipe(Path("recipes/mine.toml"))
    assert recipe.model.folder == str(tmp_path / "recipes")
    with pytest.raises(RecipeError, match="there is no module recipe_nets in"):
        check_run(recipe, 1)
    below = read_recipe(Path("recipes/mine.toml"), ["model.folder=nets"])
    assert below.model.folder == str(tmp_path / "recipes" / "nets")
    (tmp_path / "recipes" / "nets" / "recipe_nets.py").write_text("")
    check_run(below, 1)
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(to_dict(below)))
    assert read_recipe(tmp_path / "recipe.toml") == below
    assert read_recipe(DIGITS).model.folder == ""


def test_a_rule_for_a_packaged_recipe_is_found_again_in_the_folder_where_the_run_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe_rules.py").write_text("")
    recipe = read_recipe(find_recipe(Path("digits")), ["rule.name=recipe_rules:largest"])
    assert recipe.rule.folder == str(tmp_path)
    monkeypatch.chdir("/")
    check_run(recipe, 1)


def test_a_rule_is_one_of_the_table_or_ones_own(tmp_path: Path) -> None:
    from unisono.rules import RULES

    for name in RULES:
        check_run(read_recipe(DIGITS, [f"rule.name={name}"]), 2)
    with pytest.raises(
        RecipeError,
        match=r"rule.name = 'easy'; there are bsp, sharded, easgd, local_sgd, diloco, auto, or module:function of your",
    ):
        check_run(read_recipe(DIGITS, ["rule.name=easy"]), 1)
    (tmp_path / "mine.toml").write_text('[rule]\nname = "own_rules_here:make"\n')
    recipe = read_recipe(tmp_path / "mine.toml")
    assert recipe.rule.folder == str(tmp_path)
    with pytest.raises(RecipeError, match=r"rule.name = 'own_rules_here:make': there is no module own_rules_here in"):
        check_run(recipe, 1)
    (tmp_path / "own_rules_here.py").write_text("raise SystemExit('it is not run')")
    check_run(recipe, 1)


def test_recipes_of_older_runs_are_read(tmp_path: Path) -> None:
    (tmp_path / "old.toml").write_text('[exchange]\nembedding = "funnel"\nwire = "float16"\n')
    recipe = read_recipe(tmp_path / "old.toml")
    assert (recipe.rule.overlap, recipe.exchange.wire) == ("funnel", "float16")
    (tmp_path / "old.toml").write_text('[data]\nhold = "whole"\nsize = 32\n')
    recipe = read_recipe(tmp_path / "old.toml")
    assert (recipe.data.storage, recipe.data.size) == ("replicated", 32)
    (tmp_path / "new.toml").write_text('[data]\nstorage = "partitioned"\n')
    assert read_recipe(tmp_path / "new.toml", ["data.hold=whole"]).data.storage == "replicated"
    (tmp_path / "old.toml").write_text('[compute]\nconvolutions = "tried"\n')
    assert read_recipe(tmp_path / "old.toml").compute.convolutions == "autotune"
    assert read_recipe(tmp_path / "new.toml", ["compute.convolutions=tried"]).compute.convolutions == "autotune"
    (tmp_path / "odd.toml").write_text('[data]\nstorage = ["even"]\n')
    with pytest.raises(RecipeError, match=r"data\.storage"):
        read_recipe(tmp_path / "odd.toml")


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
            "parallel.layers share samples in groups of 2 ranks, which do not divide 3 ranks: start a multiple of 2",
        ),
        (
            2,
            ["rule.name=local_sgd"],
            r"rule.name = 'local_sgd' does not take the split layers of \[parallel\]: use bsp",
        ),
        (2, ["parallel.layers.a=diagonal"], "the plan of layer 'a' is 'diagonal'; it reads like"),
        (
            128 + 2,
            ["training.batch=64"],
            "130 ranks share batches of 64 samples, so some would have none; start at most 128",
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


def test_the_table_of_recipes_for_imagenet_in_the_docs() -> None:
    rows = [line.split("|")[1:-1] for line in DOCS.read_text().splitlines() if line.startswith("| `imagenet_")]
    found = {}
    for name, network, ranks, batch, epochs, rate, _ in ([cell.strip() for cell in row] for row in rows):
        found[name.strip("`")] = network.strip("`"), *(int(cell.replace(",", "")) for cell in (ranks, batch, epochs))
        recipe = read_recipe(RECIPES / f"{name.strip('`')}.toml")
        optimizer, training = recipe.optimizer, recipe.training
        scale = training.batch / optimizer.for_batch if optimizer.for_batch else 1
        course = f"a tenth every {optimizer.every:g} epochs"
        if optimizer.policy == "polynomial":
            course = f"polynomial, exponent {optimizer.power:g}"
        peak, words = rate.split(", ", 1)
        assert float(peak) == pytest.approx(optimizer.learning_rate * scale, rel=1e-3)
        assert words == course
    recipes = {path.stem: read_recipe(path) for path in RECIPES.glob("imagenet_*.toml")}
    assert found == {
        name: (one.model.name, one.ranks, one.training.batch, one.training.epochs) for name, one in recipes.items()
    }
