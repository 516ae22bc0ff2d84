from __future__ import annotations

from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from unisono.errors import ScheduleError
from unisono.placement import Placement, one_rank_per_node, regular
from unisono.schedules import SCHEDULES, find, names
from unisono.schedules.halving import halving
from unisono.schedules.ring import ring
from unisono.schedules.schedule import Action, Program, add, receive, send
from unisono.schedules.tree import tree
from unisono.view.schedule import TimedMessage, draw, draw_svg, timed_messages

PICTURES = Path(__file__).parents[2] / "docs/pictures"
SVG = "{http://www.w3.org/2000/svg}"


def in_the_docs(name: str) -> Placement:
    """Where the 8 ranks of a picture in the docs sit."""
    if name == "supernodes":
        return regular(2, 4, 1)
    return regular(1, 4, 2) if SCHEDULES[name].by_node else one_rank_per_node(8)


@pytest.mark.parametrize("name", SCHEDULES)
def test_pictures_in_the_docs_equal_the_drawing(name: str) -> None:
    placement = in_the_docs(name)
    drawn = draw_svg(find(name, placement).allreduce, 8, name, placement)
    stored = (PICTURES / f"{name}.svg").read_text(encoding="utf-8")
    assert stored == drawn, f"run: unisono draw {name} --ranks 8 --nodes {len(placement.nodes)} --svg {PICTURES}/..."


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize(
    "placement",
    [one_rank_per_node(1), one_rank_per_node(2), one_rank_per_node(7), regular(2, 2, 2)],
    ids=["1", "2", "7", "2x2x2"],
)
def test_an_arrow_for_each_message_a_row_for_each_rank_of_a_lane(name: str, placement: Placement) -> None:
    algorithm = find(name, placement).allreduce
    programs = [algorithm(rank, placement.ranks) for rank in range(placement.ranks)]
    sends = [t for p in programs for lane in p.lanes for turn in lane for t in turn if t.action is Action.SEND]
    root = ElementTree.fromstring(draw_svg(algorithm, placement.ranks, name, placement))
    heads = Counter(path.get("marker-end") for path in root.iter(f"{SVG}path"))
    assert heads["url(#head)"] == len(sends) == len(timed_messages(programs))
    rows = [
        label
        for element in root.iter(f"{SVG}text")
        if "rank " in (label := element.text or "") and "ranks" not in label
    ]
    assert len(rows) == placement.ranks * len(programs[0].lanes)
    assert all("node " in row for row in rows) == (len(placement.nodes) < placement.ranks)
    boxes = [title for group in root.iter(f"{SVG}g") if (title := group.findtext(f"{SVG}title"))]
    assert len(boxes) == len({(m.lane, m.step, m.receiver, m.chunks, m.action) for m in timed_messages(programs)})
    width, height = float(root.get("width", "")), float(root.get("height", ""))
    for box in (rectangle for group in root.iter(f"{SVG}g") for rectangle in group.iter(f"{SVG}rect")):
        assert 0 < float(box.get("x", "")) < float(box.get("x", "")) + float(box.get("width", "")) < width
        assert 0 < float(box.get("y", "")) < height


@pytest.mark.parametrize(
    ("name", "across"),
    [("halving", ["n/2", "", "", "", "", "n/2"]), ("halving/round-robin", ["", "", "n/8", "n/8", "", ""])],
)
def test_with_supernodes_each_round_has_its_cost(name: str, across: list[str]) -> None:
    """swCaffe's figure 7: half of the payload goes across in rank order, an eighth round robin."""
    placement = regular(2, 4, 1)
    algorithm = find(name, placement).allreduce
    *_, sends, last = draw(algorithm, 8, name, placement).splitlines()
    assert sends.split() == ["sends", "n/2", "n/4", "n/8", "n/8", "n/4", "n/2"]
    assert last.split() == ["across", *filter(None, across)]
    root = ElementTree.fromstring(draw_svg(algorithm, 8, name, placement))
    labels = [element.text or "" for element in root.iter(f"{SVG}text")]
    assert sum("across" in each for each in labels) == 2
    assert "sends" not in draw(algorithm, 8, name, one_rank_per_node(8))


def test_names_are_escaped() -> None:
    root = ElementTree.fromstring(draw_svg(ring, 3, "<a & b>"))
    assert root.findtext(f"{SVG}title") == "<a & b>: 3 ranks, 3 chunks"


def test_messages_of_ranks_in_step_are_drawn_in_their_round() -> None:
    for m in timed_messages([ring(rank, 5) for rank in range(5)]):
        assert m.receiver == (m.sender + 1) % 5
        assert m.action is (Action.ADD if m.step < 4 else Action.RECEIVE)
        assert m.chunk == (m.sender - m.step - (1 if m.step < 4 else -4)) % 5


def test_step_is_that_of_the_later_end() -> None:
    """Rank 0 of 4 sums from 1, a leaf, and from 2, which hears from 3 first, in one round."""
    assert [m for m in timed_messages([tree(rank, 4) for rank in range(4)]) if m.action is Action.ADD] == [
        TimedMessage(0, 0, 1, 0, 0, 1, Action.ADD),
        TimedMessage(0, 0, 3, 2, 0, 1, Action.ADD),
        TimedMessage(0, 1, 2, 0, 0, 1, Action.ADD),
    ]
    assert [(m.step, m.sender, m.receiver) for m in timed_messages([tree(rank, 4) for rank in range(4)])[3:]] == [
        (2, 0, 1),
        (2, 0, 2),
        (3, 2, 3),
    ]


def test_rounds_are_steps_only_if_all_ranks_are_in_step() -> None:
    assert "round 5" in draw_svg(ring, 4)
    assert "step 3" in draw_svg(tree, 4)
    assert "round 0" not in draw_svg(tree, 4)


def test_deadlock_raises_when_drawn() -> None:
    def stuck(rank: int, _: int) -> Program:
        return Program(1, (((receive(1 - rank, 0),), (send(1 - rank, 0),)),))

    with pytest.raises(ScheduleError, match="waits forever"):
        draw_svg(stuck, 2)


def test_two_ranks() -> None:
    assert draw(halving, 2, "halving").splitlines() == [
        "halving: 2 ranks, 2 chunks",
        "        round 0   round 1",
        "rank 0  1→1 +0←1  0→1 1←1",
        "rank 1  0→0 +1←0  1→0 0←0",
    ]


def test_lanes_are_tables_of_their_own() -> None:
    def two_lanes(rank: int, _: int) -> Program:
        return Program(4, tuple(((send(1 - rank, 2 * lane, 2), add(1 - rank, 2 * lane, 2)),) for lane in range(2)))

    assert draw(two_lanes, 2).splitlines() == [
        "schedule: 2 ranks, 4 chunks",
        "",
        "lane 0",
        "        round 0",
        "rank 0  0-1→1 +0-1←1",
        "rank 1  0-1→0 +0-1←0",
        "",
        "lane 1",
        "        round 0",
        "rank 0  2-3→1 +2-3←1",
        "rank 1  2-3→0 +2-3←0",
    ]


def test_one_rank_has_nothing_to_do() -> None:
    assert draw(halving, 1, "halving").splitlines()[0] == "halving: 1 rank, 1 chunk"
