"""A plan reads as it is written, and refuses words that are none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from unisono.errors import UsageError
from unisono.plan.layer_plan import Split, make_plan


@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("column", Split("column")),
        ("row 4", Split("row", 4)),
        ("column 2 gives part", Split("column", 2, gives="part")),
        ("row 2 takes part gives part", Split("row", 2, "part", "part")),
        ("dropout 2 dim 1", Split("dropout", 2, dim=1)),
        ("column takes own", Split("column")),
    ],
)
def test_words_are_a_split(text: str, split: Split) -> None:
    assert make_plan({"fc1": text}) == {"fc1": split} == make_plan({"fc1": split})


@given(
    st.builds(
        Split,
        st.sampled_from(["column", "row"]),
        st.integers(1, 99),
        st.sampled_from(["own", "part"]),
        st.sampled_from(["own", "part"]),
    )
)
def test_a_split_is_written_as_it_is_read(split: Split) -> None:
    assert make_plan({"layer": str(split)}) == {"layer": split}


def test_sizes_that_are_left_out_are_given() -> None:
    plan = make_plan({"a": "column", "b": "row 3", "c": "column 1"}, ranks=2)
    assert [split.ranks for split in plan.values()] == [2, 3, 1]
    assert str(plan) == "a: column 2, b: row 3, c: column 1"
    assert make_plan(plan, ranks=4) == plan


@pytest.mark.parametrize(
    "text", ["", "diagonal 2", "column two", "column 2 gives", "column 2 gives half", "row 2 takes part takes part"]
)
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(
        UsageError, match=rf"the plan of layer 'fc1' is '{text}'; it reads like \"column 2 gives part\""
    ):
        make_plan({"fc1": text})


def test_values_that_are_no_split_are_refused() -> None:
    with pytest.raises(UsageError, match="the plan of layer 'fc1' is 7; it reads like"):
        make_plan({"fc1": 7})
    with pytest.raises(UsageError, match=r"Split\(how='depth', .* is no split; it reads like"):
        Split("depth", 2)
    with pytest.raises(UsageError, match=r"plan = 'hybrid' is no plan: name layers, as in .*, or use \"auto\""):
        make_plan("hybrid")


@pytest.mark.parametrize(
    ("style", "text"),
    [
        (ColwiseParallel(), "column gives part"),
        (ColwiseParallel(output_layouts=Replicate()), "column"),
        (ColwiseParallel(input_layouts=Shard(-1)), "column takes part gives part"),
        (RowwiseParallel(), "row takes part"),
        (RowwiseParallel(input_layouts=Replicate()), "row"),
        (RowwiseParallel(output_layouts=Shard(-1)), "row takes part gives part"),
    ],
)
def test_styles_of_dtensor_are_splits(style: object, text: str) -> None:
    assert make_plan({"fc1": style}) == make_plan({"fc1": text})


def test_other_styles_are_refused() -> None:
    with pytest.raises(UsageError, match=r"layer 'norm': SequenceParallel .* is not supported: use ColwiseParallel"):
        make_plan({"norm": SequenceParallel()})
    with pytest.raises(UsageError, match=r"ColwiseParallel with layouts \(Shard\(dim=1\),\) and .* is not supported"):
        make_plan({"fc1": ColwiseParallel(input_layouts=Shard(1))})
