"""Parts of a weight are equal, and joined they are the weight: for any number of ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from unisono.plan.layer_plan import Split
from unisono.tensor_parallel.layers import HeadParallelAttention, WeightPart, become, use_sample_dropout
from unisono.tensor_parallel.layouts import SampleNumbers


@given(st.integers(1, 9), st.integers(1, 20), st.integers(0, 2))
def test_parts_are_equal_and_make_the_whole(ranks: int, length: int, dim: int) -> None:
    shape = [2, 3, 4]
    shape[dim] = length
    weight = torch.arange(float(torch.Size(shape).numel())).view(shape) + 1
    parts = [WeightPart(ranks, member, dim, weight.shape) for member in range(ranks)]
    cut = [part.cut(weight) for part in parts]
    for piece in cut:
        assert piece.shape[dim] == -(-length // ranks)
    assert torch.equal(torch.cat(cut, dim).narrow(dim, 0, length), weight)
    assert sum(int((piece != 0).sum()) for piece in cut) == weight.numel()


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2))
def test_each_block_of_a_weight_is_cut(ranks: int, blocks: int, length: int, dim: int) -> None:
    shape = [2, 3, 4]
    shape[dim] = blocks * ranks * length
    weight = torch.arange(float(torch.Size(shape).numel())).view(shape)
    cut = [WeightPart(ranks, member, dim, weight.shape, blocks).cut(weight) for member in range(ranks)]
    joined = [torch.cat([part.chunk(blocks, dim)[block] for part in cut], dim) for block in range(blocks)]
    assert torch.equal(torch.cat(joined, dim), weight)


@pytest.mark.parametrize("name", ["weights", "no weights", "masks"])
def test_an_attention_of_one_rank_drops_what_pytorchs_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it draws the same numbers; keys that nothing attends to have no weight."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(12, 3, dropout=0.3, batch_first=True).double()
    other, queries, keys = copy.deepcopy(attention), torch.randn(2, 5, 12).double(), torch.randn(2, 4, 12).double()
    masks = {
        "weights": {},
        "no weights": {"need_weights": False},
        "masks": {
            "attn_mask": torch.arange(6 * 5 * 4).view(6, 5, 4) % 3 == 0,
            "key_padding_mask": torch.tensor([[0, 0, 0, 1], [0, 0, 0, 0]]).bool(),
        },
    }[name]
    use_sample_dropout(nn.Sequential(other), SampleNumbers(7, 3, first=0))
    assert type(other) is HeadParallelAttention
    twice = [other(queries, keys, keys, **masks)[0] for _ in range(2)]
    assert torch.equal(*twice)
    monkeypatch.setattr(other, "drop_out", lambda x, p, _: functional.dropout(x, p), raising=False)
    outputs = []
    for each in (attention, other):
        torch.manual_seed(1)
        outputs.append(each(queries, keys, keys, **masks))
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)
    assert not torch.equal(outputs[0][0], twice[0])


def test_an_attention_without_dropout_or_that_cannot_be_split_stays() -> None:
    model = nn.Sequential(
        nn.MultiheadAttention(8, 2, batch_first=True),
        nn.MultiheadAttention(8, 2, 0.1, add_bias_kv=True, batch_first=True),
    )
    use_sample_dropout(model, SampleNumbers())
    assert [type(module) for module in model] == [nn.MultiheadAttention] * 2


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_masks_beside_an_attention_are_the_same_where_it_is_split(dropout: float) -> None:
    """Those of dropouts are those of a model without attentions."""
    attentions = [nn.MultiheadAttention(8, 2, p, batch_first=True) for p in (dropout, 0.3)]
    unsplit = nn.ModuleList([attentions[0], nn.Dropout(), attentions[1], nn.Dropout()])
    split, alone = copy.deepcopy(unsplit), nn.ModuleList([nn.Dropout(), nn.Dropout()])
    become(split[0], Split("heads", 2), None, {})
    for model in (unsplit, split, alone):
        use_sample_dropout(model, SampleNumbers(7, 3, first=0))
    x = torch.ones(4, 5, 8)
    for place, other in ((1, 0), (3, 1)):
        assert torch.equal(unsplit[place](x), split[place](x))
        assert torch.equal(unsplit[place](x), alone[other](x))
    assert torch.equal(*(each[2](x, x, x)[0] for each in (unsplit, split)))
    assert split[0].layer not in {split[place].layer for place in (1, 2, 3)}


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("trains", [True, False])
def test_a_whole_attention_takes_an_input_without_samples(heads: int, trains: bool) -> None:
    """As PyTorch's does: also masks, and random numbers."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, heads, 0.3, batch_first=True).train(trains)
    other, queries, keys = copy.deepcopy(attention), torch.randn(5, 8), torch.randn(4, 8)
    masks = {"attn_mask": torch.ones(5, 4).triu(1).bool(), "key_padding_mask": torch.tensor([0, 0, 0, 1]).bool()}
    use_sample_dropout(nn.Sequential(other), SampleNumbers(7, 3, first=0))
    assert type(other) is HeadParallelAttention
    outputs = []
    for each in (attention, other):
        torch.manual_seed(1)
        outputs.append(each(queries, keys, keys, **masks))
    torch.testing.assert_close(*outputs, rtol=0, atol=0)


def test_the_example() -> None:
    parts = [WeightPart(4, member, 0, torch.Size([10, 3])) for member in range(4)]
    assert [(part.start, part.size) for part in parts] == [(0, 3), (3, 3), (6, 3), (9, 3)]
