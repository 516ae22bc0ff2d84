"""Tables and rows become dataclasses; what does not fit is named in one line."""

from __future__ import annotations

from typing import Any

import pytest

from unisono.errors import UsageError
from unisono.plan.machines import NodeFacts
from unisono.plan.measured_rows import CollectiveRow, MessageRow, ProbeFacts
from unisono.plan.parse_tables import parse_factors, parse_rows, parse_table

MESSAGE = {"bytes": 4, "seconds": 1, "spread": 0}


def test_a_table_has_defaults_and_a_row_has_none() -> None:
    assert parse_table("node", NodeFacts, {"cores": 2, "flops": 3}) == NodeFacts(cores=2, flops=3.0)
    assert parse_table("probe", ProbeFacts, {"hosts": ["a", "b"]}).hosts == ("a", "b")
    assert parse_rows("message", MessageRow, [MESSAGE]) == (MessageRow(4, 1.0, 0.0),)
    assert parse_factors("slow_links", {"3": 4}) == {3: 4.0}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (3, "message row 1 = 3; it is a table of bytes, seconds, spread"),
        ({"bytes": 4, "seconds": 1}, "message row 1 has no spread; it has bytes, seconds, spread"),
        (MESSAGE | {"bytes": 0}, "message row 1.bytes = 0; it is a whole number above 0"),
        (MESSAGE | {"bytes": 4.0}, "message row 1.bytes = 4.0; it is a whole number above 0"),
        (MESSAGE | {"spread": -1}, "message row 1.spread = -1; it is a number of 0 or more"),
        (MESSAGE | {"seconds": float("inf")}, "message row 1.seconds = inf; it is a number above 0"),
        (MESSAGE | {"speed": 1}, "message row 1.speed is not one of bytes"),
    ],
)
def test_rows_that_do_not_fit(row: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_rows("message", MessageRow, [MESSAGE, row])
    assert words in str(caught.value)


def test_texts_are_not_empty_and_one_of_those_that_are_known() -> None:
    row = {"schedule": "ring", "wire": "float32", "nodes": 2, "ranks": 2} | MESSAGE
    assert parse_rows("collective", CollectiveRow, [{"collective": "allreduce"} | row])
    with pytest.raises(UsageError, match=r"row 0\.collective = 'sum'; it is one of allreduce, reduce_scatter"):
        parse_rows("collective", CollectiveRow, [{"collective": "sum"} | row])
    with pytest.raises(UsageError, match=r"row 0\.schedule = ''; it is text"):
        parse_rows("collective", CollectiveRow, [{"collective": "allreduce"} | row | {"schedule": ""}])
    with pytest.raises(UsageError, match=r"probe\.hosts = \[1\]; it is a list of texts"):
        parse_table("probe", ProbeFacts, {"hosts": [1]})
    with pytest.raises(UsageError, match=r"message = 3; it is a list of rows: begin each with \[\[message\]\]"):
        parse_rows("message", MessageRow, 3)


@pytest.mark.parametrize("values", [3, {"x": 2}, {"01": 2}, {"-1": 2}, {"1": 0.5}, {"1": True}, {"1": float("inf")}])
def test_factors_that_do_not_fit(values: Any) -> None:
    with pytest.raises(UsageError, match="slow_links"):
        parse_factors("slow_links", values)
