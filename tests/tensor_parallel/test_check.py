"""A plan that fits gets all names; every other is refused in one line that has the remedy."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from unisono.errors import UsageError
from unisono.plan.layer_plan import ParallelPlan, make_plan
from unisono.tensor_parallel.layers import KINDS, parts_of
from unisono.tensor_parallel.model import check_plan


class Net(nn.Module):
    """One layer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.maxed = nn.Embedding(10, 8), nn.Embedding(10, 8, max_norm=1.0)
        self.conv = nn.Conv2d(3, 12, 3)
        self.grouped = nn.Conv2d(4, 8, 3, groups=2)
        self.norm = nn.LayerNorm(8)
        self.fc1, self.drop1, self.fc2 = nn.Linear(8, 24), nn.Dropout(0.5), nn.Linear(24, 10)
        self.drop2 = nn.Dropout(0.5)
        self.heads = nn.MultiheadAttention(8, 2, batch_first=True)
        self.rows, self.biased = nn.MultiheadAttention(8, 4), nn.MultiheadAttention(8, 4, add_bias_kv=True)
        self.cross = nn.MultiheadAttention(8, 4, kdim=6, vdim=5, batch_first=True)
        self.zeros = nn.MultiheadAttention(8, 4, add_zero_attn=True, batch_first=True)
        self.frozen = nn.MultiheadAttention(8, 4, batch_first=True).requires_grad_(False)
        self.last, self.computed = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scaled = nn.Linear(8, 8)
        self.scaled.scale = nn.Parameter(torch.ones(8))
        del self.computed.weight
        self.computed.weight_g = nn.Parameter(torch.ones(8, 8))


def checked(layers: dict[str, str], ranks: int = 4, model: nn.Module | None = None) -> ParallelPlan:
    return check_plan(make_plan(layers), model or Net(), ranks)


def test_names_sizes_and_dropouts_are_filled_in() -> None:
    plan = checked({"fc?": "column 2 gives part", "fc2": "row 2 takes part", "words": "row"})
    assert str(plan) == "words: row 4, fc1: column 2 gives part, drop1: dropout 2 dim -1, fc2: row 2 takes part"
    plan = checked({"fc1": "column 2 gives part", "fc2": "row 2 takes part", "drop1": "dropout 2 dim 1"})
    assert "drop1: dropout 2 dim 1" in str(plan)


def test_a_layer_with_a_parameter_more_is_split() -> None:
    """Each rank holds all of that one."""
    model = Net()
    plan = checked({"scaled": "column"}, model=model)
    assert list(parts_of(model.scaled, plan["scaled"], 0)) == ["weight", "bias"]


REFUSALS = {
    "an unknown name": ({"fc3": "column"}, "names a layer 'fc3', which the model does not have; did you mean 'fc2'?"),
    "a far name": ({"xyz": "column"}, "layers that can be split are words, maxed, conv, grouped, fc1, fc2"),
    "nothing by wildcard": ({"q*": "column"}, "'q*', which the model does not have"),
    "the model": ({"": "column"}, "a layer ''"),
    "ranks": ({"fc1": "column 3"}, "layer 'fc1': groups of 3 do not divide 4 ranks: use one of 1, 2, 4"),
    "outputs": ({"fc2": "column 4"}, "layer 'fc2' (Linear) has out_features = 10, which 4 ranks cannot share evenly: "
                "groups of 2, 5, 10 can"),
    "inputs": ({"fc1": "row 16"}, "layer 'fc1' (Linear) has in_features = 8, which 16 ranks cannot share evenly"),
    "a maximum of norms": ({"maxed": "row"}, "layer 'maxed' (Embedding) has max_norm = 1.0: leave it whole"),
    "a norm": ({"norm": "column"}, "layer 'norm' is a LayerNorm, which cannot be split by column: Linear, Conv1d"),
    "rows of a convolution": ({"conv": "row"}, "'conv' is a Conv2d, which cannot be split by row: split it by column"),
    "columns of words": ({"words": "column"}, "is a Embedding, which cannot be split by column: split it by row"),
    "groups": ({"grouped": "column"}, "layer 'grouped' (Conv2d) has groups = 2: leave it whole"),
    "an attention's output": (
        {"heads.out_proj": "row"},
        "'heads.out_proj' is a NonDynamicallyQuantizableLinear, which cannot be split by row: Linear, Conv1d, Conv2d, "
        "Conv3d, Embedding and MultiheadAttention can be",
    ),
    "an attention by column": ({"heads": "column"}, "which cannot be split by column: split it by heads"),
    "heads": ({"heads": "heads 4"}, "has num_heads = 2, which 4 ranks cannot share evenly: groups of 2 can"),
    "heads of a Linear": ({"fc1": "heads"}, "is a Linear, which cannot be split by heads: split it by column or row"),
    "heads of a part": ({"heads": "heads 2 takes part"}, "takes inputs of own samples: leave away 'takes part'"),
    "heads to a part": (
        {"frozen": "heads gives part", "last": "row takes part"},
        "'frozen' gives those of 4, and 'frozen.out_proj' between (NonDynamicallyQuantizableLinear) is not known",
    ),
    "positions first": ({"rows": "heads"}, "(MultiheadAttention) has batch_first = False: leave it whole"),
    "biases of keys": ({"biased": "heads"}, "(MultiheadAttention) has bias_k = a weight: leave it whole"),
    "keys of other features": ({"cross": "heads"}, "has k_proj_weight, out_proj.weight, q_proj_weight, v_proj_weight, "
                               "not in_proj_weight and out_proj.weight: leave it whole"),
    "a key of zeros": ({"zeros": "heads"}, "(MultiheadAttention) has add_zero_attn = True: leave it whole"),
    "a computed weight": ({"computed": "column"}, "layer 'computed' (Linear) has weight_g, not weight: leave it whole"),
    "a part to nobody": ({"fc1": "column gives part"}, "'fc1' gives a part, which no layer after it takes: leave away"),
    "a part of nobody": ({"fc2": "row takes part"}, "'fc2' takes parts of 4 ranks, but no layer before it gives any"),
    "weights inside": (
        {"conv": "column gives part", "fc1": "row takes part"},
        "layer 'fc1' takes parts of 4 ranks, but 'conv' gives those of 4, and 'grouped' between needs all features of "
        "own samples: leave away",
    ),
    "two sizes": (
        {"fc1": "column 2 gives part", "fc2": "row 4 takes part"},
        "layer 'fc2' takes parts of 4 ranks, but 'fc1' gives those of 2: leave away 'takes part'",
    ),
    "no dropout": ({"fc1": "dropout 2"}, "is a Linear, which cannot be split by dropout: split it by column or row"),
    "a convolution's input": ({"conv": "column takes part"}, "takes inputs of own samples: leave away 'takes part'"),
    "a dropout of another size": (
        {"fc1": "column 2 gives part", "drop1": "dropout 4", "fc2": "row 2 takes part"},
        "no layer gives parts of 4 ranks to 'drop1': leave it out of the plan",
    ),
    "a dropout of whole features": ({"drop2": "dropout 2"}, "no layer gives parts of 2 ranks to 'drop2': leave it out"),
    "a number's part": ({"words": "row takes part"}, "takes inputs of own samples: leave away 'takes part'"),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSALS)
def test_refusals_have_one_line_and_the_remedy(why: str) -> None:
    layers, message = REFUSALS[why]
    with pytest.raises(UsageError) as raised:
        checked(layers, 16 if why == "inputs" else 4)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_ties_are_split_alike_or_not_at_all() -> None:
    class Tied(nn.Module):
        def __init__(self, rows: int) -> None:
            super().__init__()
            self.words, self.scores = nn.Embedding(rows, 8), nn.Linear(8, rows, bias=False)
            self.scores.weight = self.words.weight

    both = {"words": "row 4", "scores": "column 4"}
    assert list(checked(both, model=Tied(12))) == ["words", "scores"]
    for layers in ({"words": "row 4"}, {"scores": "column 4"}, {**both, "scores": "row 4"}, {**both, "words": "row 2"}):
        with pytest.raises(UsageError, match=r"scores.weight and words.weight are one weight, but are not split alike"):
            checked(layers, model=Tied(12))


def test_a_rank_without_rows_of_an_embedding_has_zeros() -> None:
    layer = nn.Embedding(5, 8)
    for ranks, rows in ((4, [2, 2, 1, 0]), (8, [1, 1, 1, 1, 1, 0, 0, 0])):
        split = checked({"0": f"row {ranks}"}, ranks, nn.Sequential(layer))["0"]
        parts = [parts_of(layer, split, member)["weight"].cut(layer.weight.detach()) for member in range(ranks)]
        assert {part.shape for part in parts} == {(-(-5 // ranks), 8)}
        assert [int(part.any(1).sum()) for part in parts] == rows


class UnitLength(nn.Module):
    """An own module that needs all features of a sample, which nothing but its values shows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.norm(dim=-1, keepdim=True)


class Held(nn.Module):
    """An own module without weights that holds another."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()


def pair(*between: nn.Module) -> nn.Sequential:
    """Two layers with others between them."""
    return nn.Sequential(nn.Linear(8, 8), *between, nn.Linear(8, 8))


IN_PAIR = {"0": "column 2 gives part", "2": "row 2 takes part"}


@pytest.mark.parametrize(
    "between",
    [
        *(nn.GroupNorm(2, 8, affine=False), nn.LocalResponseNorm(3), nn.GLU(), nn.BatchNorm1d(8, affine=False)),
        *(nn.LayerNorm(8, elementwise_affine=False), nn.RMSNorm(8, elementwise_affine=False), UnitLength(), Held()),
        *(nn.Softmax(-1), nn.LogSoftmax(-1), nn.Softmin(-1), nn.Softmax2d(), nn.ChannelShuffle(2)),
        *(nn.Dropout1d(), nn.AlphaDropout(), nn.FeatureAlphaDropout(), nn.RReLU()),
        *(nn.Flatten(), nn.MaxPool1d(2)),  # of parts of the channels, but not of the features of several positions
        *(type("Unit", (UnitLength, kind), {})() for kind in (nn.Sequential, nn.ModuleList, nn.ModuleDict)),
        *(nn.PReLU().requires_grad_(False), nn.LayerNorm(8).requires_grad_(False)),
    ],
    ids=lambda module: type(module).__name__,
)
def test_modules_that_are_not_known_to_work_on_each_feature_are_refused_between_parts(between: nn.Module) -> None:
    """They would take the features of a part for all of them, or draw masks of a rank's own, without a word."""
    model, kind = pair(between), type(between).__name__
    message = rf"'0' gives those of 2, and '1' between \({kind}\) is not known to .* \(if so, set works_on_parts"
    with pytest.raises(UsageError, match=message):
        checked(IN_PAIR, model=model)
    assert checked({"0": "column 2", "2": "row 2"}, model=model)
    model[1].works_on_parts = True
    assert list(checked(IN_PAIR, model=model)) == ["0", "2"]


def test_weights_that_learn_are_refused_whatever_they_say() -> None:
    """Their gradients would be of the group's samples."""
    model = pair(nn.PReLU())
    model[1].works_on_parts = True
    with pytest.raises(UsageError, match="'0' gives those of 2, and '1' between needs all features of own samples"):
        checked(IN_PAIR, model=model)


@pytest.mark.parametrize("inner", ["column 2", "column 4", "column 4 gives part"])
def test_a_split_layer_of_own_samples_is_refused_between_parts(inner: str) -> None:
    with pytest.raises(UsageError, match="'0' gives those of 4, and '1' between needs all features of own samples"):
        checked({"0": "column 4 gives part", "1": inner, "2": "row 4 takes part"}, model=pair(nn.Linear(8, 8)))


def test_a_pair_within_a_pair_is_refused_by_the_outer_one() -> None:
    plan = {"0": "column 4 gives part", "1": "column 2 gives part", "2": "row 2 takes part", "3": "row 4 takes part"}
    with pytest.raises(UsageError, match="'2' takes parts of 2 ranks, but '0' gives those of 4, and '1' between needs"):
        checked(plan, model=pair(nn.Linear(8, 8), nn.Linear(8, 8)))


def test_query_key_and_value_give_parts_in_a_row() -> None:
    """Beside each other, of groups of one size; not one behind the other."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = (nn.Sequential(nn.Linear(8, 8)) for _ in range(3))
            self.softmax, self.dropout, self.out = nn.Softmax(-1), nn.Dropout(), nn.Linear(8, 8)

    model = nn.Sequential(Attention(), Attention())
    plan = dict.fromkeys(("0.query.0", "0.key.0", "0.value.0"), "column 2 gives part")
    assert len(checked({**plan, "0.out": "row 2 takes part"}, model=model)) == 5
    with pytest.raises(UsageError, match=r"'0.query.0' gives those of 2, and '0.key.0' between needs all features"):
        checked({**plan, "0.key.0": "column 4 gives part", "0.out": "row 2 takes part"}, model=model)
    with pytest.raises(UsageError, match=r"'0.query.0' gives those of 2, and '0.out' between needs all features"):
        checked({**plan, "1.out": "row 2 takes part"}, model=model)


@pytest.mark.parametrize("place", ["before", "between", "behind"])
def test_a_named_dropout_may_be_defined_anywhere(place: str) -> None:
    """As T5 and minGPT do: only the order of calls has it between the two layers."""
    layers = {"fc1": nn.Linear(8, 8), "between": nn.ReLU(), "fc2": nn.Linear(8, 8), "behind": nn.ReLU()}
    model = nn.ModuleDict({"before": nn.ReLU(), **layers, place: nn.Dropout()})
    plan = {"fc1": "column 2 gives part", place: "dropout 2 dim 1", "fc2": "row 2 takes part"}
    assert str(checked(plan, model=model)[place]) == "dropout 2 dim 1"


def test_holders_of_modules_and_of_layers_are_between_parts() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act, self.fc = nn.ReLU(), nn.Linear(8, 8)

    shrinks = nn.Hardshrink(), nn.Softshrink(), nn.Tanhshrink(), nn.Threshold(0.0, 0.0)
    held = nn.ModuleDict({"shrinks": nn.ModuleList(shrinks), "pool": nn.Sequential(nn.AdaptiveAvgPool2d(1))})
    model = nn.ModuleDict({"conv": nn.Conv2d(3, 8, 3), "held": held, "classifier": Classifier()})
    plan = {"conv": "column 2 gives part", "classifier.fc": "row 2 takes part"}
    assert list(checked(plan, model=model)) == list(plan)


def test_channels_stay_parts_through_pools_and_flatten() -> None:
    layers = [
        *(nn.ReLU(), nn.MaxPool2d(2), nn.ZeroPad2d(1), nn.Dropout(), nn.Upsample(2), nn.LPPool2d(2, 2)),
        *(nn.ConstantPad2d(1, 0.0), nn.CircularPad2d(1), nn.ReflectionPad2d(1), nn.ReplicationPad2d(1)),
        *(nn.UpsamplingBilinear2d(scale_factor=2), nn.UpsamplingNearest2d(scale_factor=2), nn.Flatten()),
    ]
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sequential(*layers), nn.Linear(32, 8))
    plan = checked({"0": "column 4 gives part", "2": "row 4 takes part"}, model=model)
    assert str(plan["1.3"]) == "dropout 4 dim 1"
    model[1].append(nn.FractionalMaxPool2d(2, output_size=1))
    with pytest.raises(UsageError, match=r"'1.13' between \(FractionalMaxPool2d\)"):  # it draws places of each channel
        checked({"0": "column 4 gives part", "2": "row 4 takes part"}, model=model)


@pytest.mark.parametrize(
    ("givers", "softmax", "fits"),
    [
        ([nn.Linear(8, 8)] * 3, nn.Softmax(-1), True),
        ([nn.Linear(8, 8)] * 3, nn.Sequential(nn.Softmax(-1)), False),
        ([nn.Linear(8, 8)] * 2, nn.Softmax(-1), False),
        ([nn.Linear(8, 8)], nn.Softmax(-1), False),
        ([nn.Conv1d(8, 8, 1)] * 3, nn.Softmax(1), False),
    ],
)
def test_a_softmax_is_over_the_keys_where_query_key_and_value_give_parts(
    givers: list[nn.Module], softmax: nn.Module, fits: bool
) -> None:
    """Elsewhere it may be over the features, of which each rank has a part."""
    layers = {f"in{place}": copy.deepcopy(giver) for place, giver in enumerate(givers)}
    model = nn.ModuleDict({**layers, "softmax": softmax, "out": nn.Linear(8, 8)})
    plan = {**dict.fromkeys(layers, "column 2 gives part"), "out": "row 2 takes part"}
    if fits:
        assert list(checked(plan, model=model)) == list(plan)
    else:
        with pytest.raises(UsageError, match=r"\(Softmax\) is not known to work on each feature by itself"):
            checked(plan, model=model)


def test_a_weight_of_an_attention_that_another_layer_has_is_split_alike_or_not_at_all() -> None:
    model = nn.ModuleDict({"heads": nn.MultiheadAttention(8, 4, batch_first=True), "fc": nn.Linear(8, 8)})
    model["fc"].weight = model["heads"].out_proj.weight
    assert list(checked({"heads": "heads 2", "fc": "row 2"}, model=model)) == ["heads", "fc"]
    for plan in ({"heads": "heads 2"}, {"heads": "heads 2", "fc": "column 2"}):
        with pytest.raises(UsageError, match=r"fc.weight and heads.out_proj.weight are one weight, but are not split"):
            checked(plan, model=model)


def test_a_weight_of_two_layers_is_divided_evenly() -> None:
    """Each layer would pad its own parts."""
    model = nn.Sequential(nn.Embedding(10, 8), nn.Embedding(10, 8))
    both = {"0": "row 4", "1": "row 4"}
    assert list(checked(both, model=model)) == ["0", "1"]
    model[1].weight = model[0].weight
    with pytest.raises(UsageError, match=r"one weight, but are not split alike: .*, which they divide, or neither"):
        checked(both, model=model)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_each_rank_holds_a_pth_of_split_weights(ranks: int) -> None:
    layers = {
        "column": nn.Linear(840, 1680),
        "row": nn.Linear(840, 16),
        "column ": nn.Conv2d(3, 840, 3),
        "row ": nn.Embedding(840, 4),
    }
    for how, layer in layers.items():
        split = make_plan({"layer": f"{how} {ranks}"})["layer"]
        assert not KINDS[type(layer), split.how].refusal(layer, split)
        for member in range(ranks):
            for name, part in parts_of(layer, split, member).items():
                full = layer.get_parameter(name)
                assert part.cut(full.detach()).numel() == full.numel() // ranks


def test_every_kind_is_a_layer_of_its_class() -> None:
    assert all(issubclass(kind, layer) for (layer, _), kind in KINDS.items())
