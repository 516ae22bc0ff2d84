import json
from math import inf
from pathlib import Path
from typing import Any

import pytest

from unisono.errors import UsageError
from unisono.training.measures import PERPLEXITY, Curve, curves_of, draw, finite_part, summarize
from unisono.training.run_directory import METRICS, add_metrics


def line(epoch: int, top1: float, **more: Any) -> dict[str, Any]:
    return {"epoch": epoch, "elapsed": 30.0 * epoch, "test_accuracy": top1, "loss": 0.1, **more}


def test_a_curve_is_read_from_the_metrics(tmp_path: Path) -> None:
    for epoch, top1 in ((1, 0.5), (2, 0.75)):
        add_metrics(tmp_path, line(epoch, top1, test_top5=0.9))
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"epoch": 3, "elap')  # the run goes on, or was killed here
    assert curves_of([tmp_path]) == [Curve(tmp_path.name, (1, 2), (30.0, 60.0), (0.5, 0.75), (0.9, 0.9))]


def test_few_classes_have_no_top5(tmp_path: Path) -> None:
    add_metrics(tmp_path, line(1, 0.5))
    assert curves_of([tmp_path])[0].top5 == ()


def test_what_is_no_run_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"has no run with a finished epoch: {METRICS} is empty or missing"):
        curves_of([tmp_path])


def test_what_was_reached_is_said() -> None:
    curve = Curve("mine", (1, 2, 3), (30.0, 60.0, 95.4), (0.5, 0.8, 0.7512), ())
    assert summarize(curve) == "mine: 75.12% after 3 epochs, 1:35 min (best 80.00% after 2)"
    assert summarize(Curve("mine", (1,), (5.0,), (0.5,), ())) == "mine: 50.00% after 1 epochs, 0:05 min"


def test_the_image_names_each_run() -> None:
    pytest.importorskip("matplotlib")
    curves = [
        Curve("one", (1, 2), (30.0, 60.0), (0.5, 0.75), (0.9, 0.95)),
        Curve("other", (1,), (10.0,), (0.25,), ()),
    ]
    drawn = draw(curves, "a title").decode()
    for text in ("one, top-1", "one, top-5", ">other<", "seconds", "epochs", "test accuracy", "a title"):
        assert text in drawn


def test_metrics_of_a_run_are_lines_of_json(tmp_path: Path) -> None:
    add_metrics(tmp_path, line(1, 0.5))
    assert json.loads((tmp_path / METRICS).read_text())["elapsed"] == 30.0


def test_runs_on_texts_are_compared_by_perplexity(tmp_path: Path) -> None:
    for name, perplexity in (("one", 8.0), ("other", 4.0)):
        (tmp_path / name).mkdir()
        add_metrics(tmp_path / name, line(1, 0.5, test_perplexity=perplexity, test_top5=0.9))
    (tmp_path / "image").mkdir()
    add_metrics(tmp_path / "image", line(1, 0.25))
    first, second = curves_of([tmp_path / "one", tmp_path / "other"])
    assert (first.values, second.values, first.top5) == ((8.0,), (4.0,), ())
    assert first.measure is second.measure is PERPLEXITY
    assert [curve.values for curve in curves_of([tmp_path / "one", tmp_path / "image"])] == [(0.5,), (0.25,)]


TEXT = Curve("mine", (1, 2, 3), (30.0, 60.0, 95.4), (9.0, 4.0, 4.5), (), PERPLEXITY)


def test_the_best_perplexity_is_the_lowest() -> None:
    assert summarize(TEXT) == "mine: perplexity 4.50 after 3 epochs, 1:35 min (best 4.00 after 2)"


def test_the_image_of_texts_has_their_measure() -> None:
    pytest.importorskip("matplotlib")
    drawn = draw([TEXT]).decode()
    assert "test perplexity" in drawn
    assert "top-1" not in drawn


def test_epochs_after_divergence_are_not_drawn() -> None:
    diverged = Curve("mine", (1, 2, 3), (30.0, 60.0, 95.4), (9.0, inf, inf), (), PERPLEXITY)
    assert finite_part(diverged) == Curve("mine", (1,), (30.0,), (9.0,), (), PERPLEXITY)
    assert finite_part(TEXT) == TEXT
