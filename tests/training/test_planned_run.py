from pathlib import Path

import pytest

from unisono.errors import UsageError
from unisono.rules import BSP, DiLoCo, Exchange, LocalSGD, Sharded
from unisono.training.planned_run import planned_run, rule_of, settings_of, traced_layers
from unisono.training.recipe import parse_recipe


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


def test_split_layers_are_not_planned(tmp_path: Path) -> None:
    text = '[parallel]\nlayers = "auto"\n'
    assert parse_recipe({"parallel": {"layers": "auto"}}, "here").parallel.layers == "auto"
    (tmp_path / "wide.toml").write_text(text)
    with pytest.raises(UsageError, match="plan it without its table"):
        planned_run(tmp_path / "wide.toml", None, None)


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("bsp", BSP()),
        ("sharded", Sharded()),
        ("local_sgd:16", LocalSGD(every=16)),
        ("local_sgd:auto", LocalSGD(every="auto")),
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
        ("local_sgd:x", "every must be 1 or more"),
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


def test_layers_are_traced_for_the_samples() -> None:
    layers = traced_layers(planned_run(None, "small_convnet", 4), (1, 8, 8), 10, 2)
    assert sum(layer.parameters for layer in layers) > 1000
    assert layers[0].input_shapes[0] == (2, 1, 8, 8)
