from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from unisono.data.loading import PROCESSOR
from unisono.data.options import DataOptions
from unisono.errors import UsageError
from unisono.training.scoring.evaluate import forward_of
from unisono.training.scoring.predict import (
    most_probable,
    open_inputs,
    predict,
)


class Brightness(torch.nn.Module):
    """Scores of 10 classes: the mean of the pixels for class 3, its negative for class 4, else far below."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        mean, scores = inputs.mean((1, 2, 3)), torch.full((len(inputs), 10), -9.0, dtype=inputs.dtype)
        scores[:, 3], scores[:, 4] = mean, -mean
        return scores


def test_each_file_has_a_prediction_or_an_error(tmp_path: Path) -> None:
    for name, value in (("white.png", 255), ("black.png", 0)):
        Image.fromarray(np.full((8, 8), value, np.uint8)).save(tmp_path / name)
    (tmp_path / "text.png").write_text("no image")
    files = [tmp_path / name for name in ("white.png", "missing.png", "text.png", "black.png")]
    forward = forward_of(Brightness(), torch.float64, nullcontext, PROCESSOR)
    predictions = list(predict(forward, open_inputs(DataOptions(), ""), files, 2))
    white, missing, text, black = predictions
    assert ["error" in data for _, data in predictions] == [False, True, True, False]
    (first, second), (third, fourth) = white[1]["classes"], black[1]["classes"]
    assert [first["class"], second["class"]] == ["3", "4"]
    assert first["probability"] / second["probability"] == pytest.approx(np.exp(2))
    assert third["probability"] == pytest.approx(fourth["probability"])
    assert white[0] == f"3 {first['probability']:.2%}  4 {second['probability']:.2%}"
    reason = "No such file or directory; give the path of a file that can be read"
    assert missing == (reason, {"error": reason})
    assert text[0].startswith("it is no image in a format that Pillow knows; the run takes images")


NAMES = ("a", "b", "c")
SCORES = torch.tensor([1.0, 3.0, 2.0])


def test_the_most_probable_come_first_with_their_probabilities() -> None:
    guesses = most_probable(SCORES, NAMES.__getitem__, 2)
    assert [name for name, _ in guesses] == ["b", "c"]
    total = sum(np.exp([1.0, 3.0, 2.0]))
    assert [share for _, share in guesses] == pytest.approx([np.exp(3) / total, np.exp(2) / total], rel=1e-12)
    assert sum(share for _, share in most_probable(SCORES, NAMES.__getitem__, 9)) == pytest.approx(1)


def test_scores_that_are_not_finite_are_no_prediction() -> None:
    with pytest.raises(UsageError, match="not finite"):
        most_probable(torch.tensor([1.0, float("nan")]), NAMES.__getitem__, 1)
