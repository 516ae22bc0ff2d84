"""Charts of measured times."""

from __future__ import annotations

import pytest

from unisono.view.timings import Bar, Times, draw_bars, draw_times

pytest.importorskip("matplotlib")

SOME, NONE = Times([4, 8], [1e-6, 2e-6], [1e-6, 1e-6], [2e-6, 3e-6]), Times([], [], [], [])


@pytest.mark.parametrize(("short", "long"), [(SOME, SOME), (SOME, NONE), (NONE, SOME)])
def test_short_and_long_payloads_have_panels_of_their_own(short: Times, long: Times) -> None:
    """A benchmark of few sizes has one of them alone."""
    drawn = draw_times({"ring": short}, {"ring": long}, ("ring",), "allreduce").decode()
    assert "allreduce" in drawn
    assert drawn.count("payload") == 2 - (NONE in (short, long))


def test_bars_have_a_panel_each() -> None:
    drawn = draw_bars({"forward": {"conv1": Bar(2e-3, 1e-3)}, "backward": {}}, ["conv1"], "AlexNet").decode()
    assert all(word in drawn for word in ("forward", "backward", "conv1", "AlexNet"))
