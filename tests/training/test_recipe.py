"""Recipes as they are read from files, and their differences."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import tomli_w

from unisono.errors import PackError, RecipeError
from unisono.models import MODELS
from unisono.rules import EASGD, RULES, own_options
from unisono.training.recipe import (
    FOLDER,
    Recipe,
    RuleRecipe,
    differences,
    find_recipe,
    names,
    parse_recipe,
    rate_at,
    read_recipe,
    to_dict,
)
from unisono.training.recipe_check import check_run, describe_unused, make_rule

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
    assert recipe.model.name in MODELS
    assert recipe.training.batch >= recipe.ranks
    made = "unisono pack" in path.read_text()
    assert made == bool(recipe.data.pack), "it says how its pack is made"
    assert f"unisono train {path.stem}" in path.read_text()


def test_a_recipe_survives_toml(tmp_path: Path) -> None:
    recipe = read_recipe(DIGITS)
    (tmp_path / "copy.toml").write_text(tomli_w.dumps(to_dict(recipe)))
    assert read_recipe(tmp_path / "copy.toml") == recipe
    assert parse_recipe(Recipe, {}, "nothing") == Recipe()


@pytest.mark.parametrize(
    ("change", "message"),
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
            "rule.overlap = 'tunnel'; it is one of auto, chain, phases, concurrent, funnel, none",
        ),
        ("rule.overlp=chain", "unknown key rule.overlp; did you mean rule.overlap?"),
        ("rule.fragmets=3", "unknown key rule.fragmets; did you mean rule.fragments?"),
        ("rule.servers=0", "rule.servers = 0, but it has to be at least 1"),
        ("rule.server=node", "rule.server = 'node'; it is one of rank, thread"),
        ("rule=3", "rule is a table of keys, not the value 3"),
        ("model.dtype=float16", "model.dtype = 'float16'; it is one of float32, float64"),
        ("training=3", "training is a table of keys, not the value 3"),
        ("data.storage=odd", "data.storage = 'odd'; it is one of partitioned, replicated, streamed, files, auto"),
        ("data.groups=0", "data.groups = 0, but it has to be at least 1"),
        ("data.size=-1", "data.size = -1, but it has to be at least 0"),
        ("data.size=32.5", "data.size = 32.5 is not a whole number"),
        ("data.windows=0", "data.windows = 0, but it has to be at least 1"),
        ("data.context=-1", "data.context = -1, but it has to be at least 0"),
        ("data.augment=rotate", "data.augment = 'rotate'; it is one of none, mirror, shift, scale, crop, mask"),
        ("data.threads=-2", "data.threads = -2, but it has to be at least 0"),
        ("data.pack=7", "data.pack = 7 is not a string"),
        ("data.packs=here", "unknown key data.packs; did you mean data.pack?"),
        ("name.first=3", "'name' is a value, not a table"),
        ("epochs", "not of the form key=value"),
    ],
)
def test_a_bad_change_names_itself_and_the_nearest(change: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read_recipe(DIGITS, [change])
    assert message in str(caught.value)
    assert f"--set {change}" in str(caught.value)


def test_a_file_that_is_no_recipe(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("name = ")
    with pytest.raises(RecipeError, match=r"bad\.toml is not TOML"):
        read_recipe(path)
    path.write_text("# no key\n")
    with pytest.raises(RecipeError, match=r"the recipe .*bad\.toml is empty"):
        read_recipe(path)
    path.write_text("ranks = 3\n", encoding="utf-8-sig")  # as some editors begin a file
    assert read_recipe(path).ranks == 3
    with pytest.raises(RecipeError, match="No such file"):
        read_recipe(tmp_path / "none.toml")


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


def test_data_and_a_plan_are_found_again_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are given from the current folder, also beside a recipe that is elsewhere."""
    monkeypatch.chdir(tmp_path)
    recipe = read_recipe(DIGITS, ["data.pack=packs/pets", "data.files=pets", "compute.plan=plan.json"])
    assert recipe.data.files == str(tmp_path / "pets")
    assert (recipe.data.pack, recipe.compute.plan) == (str(tmp_path / "packs" / "pets"), str(tmp_path / "plan.json"))
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(to_dict(recipe)))
    monkeypatch.chdir("/")
    assert read_recipe(tmp_path / "recipe.toml") == recipe
    assert (read_recipe(DIGITS).data.pack, read_recipe(DIGITS).compute.plan) == ("", "")
    with pytest.raises(PackError, match=r"there is no such folder; .* or name another folder: data\.pack of a recipe"):
        check_run(recipe, 1)


def test_a_rule_for_a_packaged_recipe_is_found_again_in_the_folder_where_the_run_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe_rules.py").write_text("")
    recipe = read_recipe(find_recipe(Path("digits")), ["rule.name=recipe_rules:largest"])
    assert recipe.rule.folder == str(tmp_path)
    monkeypatch.chdir("/")
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


def test_options_of_a_rule_are_keys_of_its_table_or_of_a_table_of_their_own(tmp_path: Path) -> None:
    flat, nested = tmp_path / "flat.toml", tmp_path / "nested.toml"
    flat.write_text('[rule]\nname = "diloco"\nevery = 8\nouter_rate = 1\nalpha = 0.25\n')
    nested.write_text('[rule]\nname = "diloco"\n[rule.options]\nevery = 8\nouter_rate = 1.0\nalpha = 0.25\n')
    recipe = read_recipe(flat)
    assert recipe == read_recipe(nested)
    assert (recipe.rule.options["every"], recipe.rule.options["outer_rate"]) == (8, 1.0)
    assert recipe.rule.options["fragments"] == 4, "the default of the rule's class"
    for path in (flat, nested):
        for key in ("rule.every", "rule.options.every"):
            assert read_recipe(path, [f"{key}=4"]).rule.options["every"] == 4
    assert to_dict(recipe)["rule"]["every"] == 8, "written as by older releases"
    nested.write_text("[rule]\noptions = 3\n")
    with pytest.raises(RecipeError, match=r"rule\.options is a table of keys, not the value 3"):
        read_recipe(nested)


OLD_RULE = """
[rule]
name = "easgd"
folder = ""
overlap = "auto"
scale = "mean"
every = 16
outer_rate = 0.7
outer_momentum = 0.9
fragments = 4
delay = 1
alpha = 0.3
period = 2
server = "thread"
servers = 2
staleness = 8
"""
"""Table of a run's recipe as releases wrote it whose recipes had the keys of all rules at hand."""


def test_the_rule_of_an_older_runs_recipe_is_read(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(OLD_RULE)
    recipe = read_recipe(tmp_path / "recipe.toml")
    assert make_rule(recipe) == EASGD(alpha=0.3, period=2, server="thread", servers=2, staleness=8)
    changes = ["rule.name=easgd", "rule.alpha=0.3", "rule.period=2", "rule.server=thread", "rule.servers=2"]
    assert recipe.rule == read_recipe(DIGITS, [*changes, "rule.staleness=8"]).rule
    assert describe_unused(recipe.rule) == []


@pytest.mark.parametrize("rule", list(RULES))
def test_a_recipe_can_set_every_option_of_a_rule_and_a_wrong_value_is_named(rule: str) -> None:
    for key, option in own_options(rule).items():
        assert read_recipe(DIGITS, [f"rule.name={rule}"]).rule.options[key] == option.default
        with pytest.raises(RecipeError, match=rf"--set rule\.{key}=\[\]: rule\.{key} = \[\] is not"):
            read_recipe(DIGITS, [f"rule.name={rule}", f"rule.{key}=[]"])


def test_the_table_of_recipes_for_imagenet_in_the_docs() -> None:
    rows = [line.split("|")[1:-1] for line in DOCS.read_text().splitlines() if line.startswith("| `imagenet")]
    table = {}
    for name, network, ranks, batch, epochs, rate, _ in ([cell.strip() for cell in row] for row in rows):
        table[name.strip("`")] = network.strip("`"), *(int(cell.replace(",", "")) for cell in (ranks, batch, epochs))
        recipe = read_recipe(RECIPES / f"{name.strip('`')}.toml")
        optimizer, training = recipe.optimizer, recipe.training
        scale = training.batch / optimizer.for_batch if optimizer.for_batch else 1
        course = f"a tenth every {optimizer.every:g} epochs"
        if optimizer.policy == "polynomial":
            course = f"polynomial, exponent {optimizer.power:g}"
        peak, policy = rate.split(", ", 1)
        assert float(peak) == pytest.approx(optimizer.learning_rate * scale, rel=1e-3)
        assert policy == course
    recipes = {path.stem: read_recipe(path) for path in RECIPES.glob("imagenet*.toml")}
    assert table == {
        name: (recipe.model.name, recipe.ranks, recipe.training.batch, recipe.training.epochs)
        for name, recipe in recipes.items()
    }


PAPERS: dict[str, tuple[str, str, str, int, float, float]] = {
    "imagenet_alexnet": ("Theano-MPI, table 1, 8GPU with BS 32; 4, SUBGD", "sum", "direct", 8, 32, 8 * 0.005),
    "imagenet_googlenet": ("Theano-MPI, table 1, 8GPU with BS 32; 4, SUBGD", "sum", "direct", 8, 32, 8 * 0.005),
    "imagenet_resnet50": ("DIMD 5, 0.1 k n / 256 with k = 64", "mean", "auto", 128, 64, 0.1 * 64 * 128 / 256),
    "imagenet22k_resnet50": ("chosen: those for 1,000 classes; DIMD 5 has the data", "mean", "auto", 128, 64, 3.2),
    "imagenet_resnet50_256": ("MXNET-MPI 5.2, figure 16: 1.0 on 256 GPUs", "mean", "auto", 256, 32, 1.0),
    "imagenet_inception_bn": ("chosen: MXNET-MPI 5.2 has ResNet-50's rate alone", "mean", "auto", 256, 32, 1.0),
    "imagenet_vgg_a": (
        "Simonyan and Zisserman 3.1, 0.01 for 256; PCL-DNN 5.2, 512 on 128",
        "mean",
        "auto",
        128,
        4,
        0.02,
    ),
    "imagenet_alexnet_bn": ("chosen: swCaffe 6.3 has the samples of a node alone", "mean", "auto", 16, 256, 0.16),
}
"""Source, combination of gradients, exchange, ranks, samples of a rank, and effective rate: that of their mean."""


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("imagenet*.toml")))
def test_the_effective_rate_is_that_of_the_paper(name: str) -> None:
    """The rate of a sum counts once for each rank."""
    recipe = read_recipe(RECIPES / f"{name}.toml")
    _, scale, algorithm, ranks, samples, rate = PAPERS[name]
    assert (recipe.rule.name, recipe.rule.options["scale"], recipe.exchange.algorithm) == ("bsp", scale, algorithm)
    assert (recipe.ranks, recipe.training.batch) == (ranks, ranks * samples)
    options, training = recipe.optimizer, recipe.training
    peak = rate_at(options, options.warm_epochs, training.epochs, training.batch)
    assert peak * (ranks if recipe.rule.options["scale"] == "sum" else 1) == pytest.approx(rate)


def test_easgd_is_theano_mpis_with_plain_momentum() -> None:
    """Nesterov's momentum would be EAMSGD, which Theano-MPI does not train with."""
    optimizers = {path.stem: read_recipe(path).optimizer for path in RECIPES.glob("*_easgd.toml")}
    assert {
        name: (optimizer.name, optimizer.momentum, optimizer.nesterov) for name, optimizer in optimizers.items()
    } == dict.fromkeys(optimizers, ("sgd", 0.9, False))


def test_every_recipe_of_the_package_is_found_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "digits" in names()
    for name in names():
        assert find_recipe(Path(name)) == FOLDER / f"{name}.toml"
        assert read_recipe(find_recipe(Path(name))).name == name


def test_a_file_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()  # a data set, perhaps
    assert find_recipe(Path("digits")) == FOLDER / "digits.toml"
    (tmp_path / "digits").rmdir()
    (tmp_path / "digits").write_text("")
    assert find_recipe(Path("digits")) == Path("digits")
    assert find_recipe(Path("digits.toml")) == Path("digits.toml")
    assert find_recipe(Path("below/digits")) == Path("below/digits")


def test_an_unknown_name_brings_the_nearest_or_all_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=r"^no recipe digit: did you mean digits\?$"):
        find_recipe(Path("digit"))
    with pytest.raises(RecipeError, match=r"no recipe mine: it is neither a file nor one of .*digits"):
        find_recipe(Path("mine"))


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


def test_the_overlaps_are_those_of_step_programs() -> None:
    from unisono.step.overlaps import OVERLAPS

    for name in OVERLAPS:
        assert read_recipe(DIGITS, [f"rule.overlap={name}"]).rule.overlap == name
    choices = next(field for field in fields(RuleRecipe) if field.name == "overlap").metadata["one_of"]
    assert sorted(choices) == sorted(["auto", *OVERLAPS])
