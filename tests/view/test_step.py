from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from unisono.rules import BSP, LocalSGD
from unisono.step.layout import ActivationExchange, even_layout
from unisono.step.overlaps import OVERLAPS
from unisono.view.step import draw, draw_svg, picture_of

PICTURES = Path(__file__).parents[2] / "docs/pictures"
SVG = "{http://www.w3.org/2000/svg}"


def test_a_row_for_each_lane_and_time_from_left_to_right() -> None:
    drawn = draw(picture_of(BSP(overlap="chain"), even_layout(2, 3), 1, "bsp, chain")).splitlines()
    assert drawn[0] == "bsp, chain"
    assert [line.split("│")[0].strip() for line in drawn[2:5]] == ["main", "communication", "update"]
    main, communication, update = (line.split("│")[1] for line in drawn[2:5])
    assert main.index("b0") < communication.index("w0") < update.index("p1") < communication.index("a1")
    assert communication.index("a1") < update.index("s1") < update.index("u1")
    assert drawn[-1] == "f forward  b backward  w agree  p pack  a allreduce  s set_grads  u update"


def test_exchanges_of_activations_are_on_the_lane_that_waits_for_them() -> None:
    pairs = ((0, 1), (2, 3))
    exchanges = tuple(ActivationExchange(0, 8, pairs, *when) for when in ((False, True), (True, False)))
    drawn = draw(picture_of(BSP(overlap="chain"), replace(even_layout(4, 2), activations=exchanges), 1)).splitlines()
    assert drawn[0].split("│")[1].replace("·", " ").split() == ["f0", "x0", "b0", "x1", "b2"]
    assert "x activations" in drawn[-1]


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_the_pictures_in_the_docs_are_up_to_date(overlap: str) -> None:
    layout = replace(even_layout(4, 4), nodes=((0, 1), (2, 3)))
    drawn = draw_svg(picture_of(BSP(overlap=overlap), layout, 2, f"bsp, {overlap}, 4 buckets, 2 steps"))
    path = PICTURES / f"step-{overlap}.svg"
    run = f"run: unisono draw step --overlap {overlap} --nodes 2 --svg {path}"
    assert path.read_text(encoding="utf-8") == drawn, run


def test_a_box_for_each_task_with_its_name() -> None:
    picture = picture_of(LocalSGD(every=2), even_layout(3, 3), 2, "<local & sgd>")
    root = ElementTree.fromstring(draw_svg(picture))
    boxes = [title for group in root.iter(f"{SVG}g") if (title := group.findtext(f"{SVG}title"))]
    assert len(boxes) == len(picture.spans)
    assert root.findtext(f"{SVG}title") == "<local & sgd>"
    assert any(title.startswith("unpack_weights 3: ") for title in boxes)


def test_phases_have_lanes_of_their_own() -> None:
    layout = replace(even_layout(4, 2), nodes=((0, 1), (2, 3)))
    drawn = draw(picture_of(BSP(overlap="phases"), layout, 1)).splitlines()
    lanes = {line.split("│")[0].strip(): line.split("│")[1] for line in drawn if "│" in line}
    assert list(lanes) == ["main", "node", "communication", "copies", "update"]
    assert lanes["node"].index("N1") < lanes["communication"].index("a1") < lanes["copies"].index("C1")
    assert "N node_sum" in drawn[-1]
    alone = draw(picture_of(BSP(overlap="phases"), even_layout(4, 2), 1))
    assert alone == draw(picture_of(BSP(overlap="chain"), even_layout(4, 2), 1))


def test_concurrent_tasks_have_separate_rows() -> None:
    lanes = draw(picture_of(BSP(overlap="concurrent"), even_layout(2, 4), 1)).splitlines()
    rows = [line for line in lanes if "│" in line and not line.split("│")[0].strip()]
    assert len(rows) == 1
    assert "a" in rows[0]
