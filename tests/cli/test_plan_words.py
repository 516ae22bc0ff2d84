"""Words of the options of `unisono plan`; other words are refused in `test_plan.py`, by the command."""

from __future__ import annotations

import pytest

from unisono.cli.plan_words import factors_of, node_counts, sample_shape
from unisono.errors import UsageError


def test_numbers_of_nodes() -> None:
    assert node_counts("4") == (4,)
    assert node_counts("1,3,4") == (1, 3, 4)
    assert node_counts("1,2,4,...,20") == (1, 2, 4, 8, 16)
    assert node_counts("1,10,...,1000") == (1, 10, 100, 1000)


@pytest.mark.parametrize("words", ["0", "2,2", "x", "1,...,8", "2,3,...,8", "1,2,...,"])
def test_no_numbers_of_nodes(words: str) -> None:
    with pytest.raises(UsageError, match=f"--nodes {words}: "):
        node_counts(words)


def test_the_shape_of_a_sample() -> None:
    assert sample_shape(None) == ()
    assert sample_shape("3x224x192") == (3, 224, 192)


@pytest.mark.parametrize("words", ["", "3x", "0x3", "3*3"])
def test_no_shape(words: str) -> None:
    with pytest.raises(UsageError, match="give the shape of a sample"):
        sample_shape(words)


def test_factors_by_node() -> None:
    assert factors_of("--slow-link", ["3:4", "0:1.5", "3:2"], 4) == {0: 1.5, 3: 2.0}
    assert factors_of("--slow-link", [], 4) == {}


@pytest.mark.parametrize("words", ["3", ":4", "3:", "3:fast", "-1:2", "0:0.5", "0:inf", "0:nan"])
def test_no_factors(words: str) -> None:
    with pytest.raises(UsageError, match=f"--slow-node {words}: give NODE:FACTOR, a factor of 1 or more, as in 3:4"):
        factors_of("--slow-node", [words], 4)


def test_a_node_that_is_not_there_has_no_factor() -> None:
    with pytest.raises(UsageError, match="--slow-link 4:2: there is no node 4; nodes are 0 to 3"):
        factors_of("--slow-link", ["4:2"], 4)
