from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from unisono.step.tracks import tracks


class Span(NamedTuple):
    begin: float
    end: float
    name: str = ""


def test_each_span_goes_to_the_first_free_track() -> None:
    one, two, three = Span(0, 4, "one"), Span(2, 8, "two"), Span(4, 6, "three")
    assert tracks([three, two, one]) == [[one, three], [two]]
    assert tracks([]) == []


spans = st.tuples(st.integers(0, 20), st.integers(1, 9)).map(lambda pair: Span(pair[0], sum(pair)))


@given(st.lists(spans))
def test_no_two_overlap_and_there_are_no_more_tracks_than_spans_at_once(given: list[Span]) -> None:
    found = tracks(given)
    assert sorted(one for track in found for one in track) == sorted(given)
    assert all(before.end <= after.begin for track in found for before, after in pairwise(track))
    at_once = max((sum(one.begin <= time < one.end for one in given) for time in range(30)), default=0)
    assert len(found) == at_once
