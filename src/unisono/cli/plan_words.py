"""Words of the options of `unisono plan`: numbers of nodes, the shape of a sample, factors of nodes.

--nodes 1,2,4,...,16     ─▶ (1, 2, 4, 8, 16)
--input 3x224x224        ─▶ (3, 224, 224)
--slow-link 3:4          ─▶ {3: 4.0}
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from unisono.cli.units import MAX_DIGITS, check_most
from unisono.errors import UsageError

MAX_SAMPLE_NUMBERS = 10**9
"""Largest number of numbers in a sample."""


def node_counts(words: str) -> tuple[int, ...]:
    """Return numbers of nodes: 1,2,4,...,32 are 1, 2, 4, 8, 16 and 32. Raises UsageError for other words."""
    before, dots, last = words.partition(",...,")
    counts = [_number(one) for one in before.split(",")]
    if dots:
        if len(counts) < 2 or not _number(last) or not 0 < counts[-2] < counts[-1] or counts[-1] % counts[-2]:
            raise UsageError(f"--nodes {words}: two numbers, the second a multiple, go before the dots, one behind")
        factor = counts[-1] // counts[-2]
        while counts[-1] * factor <= _number(last):
            counts.append(counts[-1] * factor)
    if min(counts) < 1 or sorted(set(counts)) != counts:
        raise UsageError(f"--nodes {words}: give rising numbers, 1 or more, as in 1,2,4 or 1,2,4,...,1024")
    return tuple(counts)


def sample_shape(words: str | None) -> tuple[int, ...]:
    """Return the shape that words such as 3x224x224 give; empty without any. Raises UsageError for other words."""
    sizes = tuple(_number(one) for one in words.split("x")) if words is not None else ()
    if not all(sizes):
        raise UsageError(f"--input {words}: give the shape of a sample, as in 3x224x224")
    check_most(f"input {words} has", prod(sizes), MAX_SAMPLE_NUMBERS)
    return sizes


def factors_of(option: str, given: Sequence[str], nodes: int) -> dict[int, float]:
    """Return the factors of nodes from words such as 3:4. Raises UsageError for other words, and for other nodes."""
    found = {}
    for words in given:
        node, _, factor = words.partition(":")
        try:
            times = float(factor) if node.isdecimal() and len(node) <= MAX_DIGITS else 0.0
        except ValueError:
            times = 0.0
        if not 1 <= times < float("inf"):
            raise UsageError(f"{option} {words}: give NODE:FACTOR, a factor of 1 or more, as in 3:4")
        if int(node) >= nodes:
            raise UsageError(f"{option} {words}: there is no node {node}; nodes are 0 to {nodes - 1}")
        found[int(node)] = times
    return found


def _number(text: str) -> int:
    """Return a whole number; 0 for other words, and for more digits than any number here has."""
    return int(text) if text.isdecimal() and len(text) <= MAX_DIGITS else 0
