from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from unisono.errors import UsageError
from unisono.training.recipe import DataRecipe
from unisono.training.scoring.file_inputs import open_file_inputs
from unisono.training.scoring.predict import FilePrediction, best_classes, predict


class Brightness(torch.nn.Module):
    """Scores of 10 classes: the mean of the pixels for class 3, its negative for class 4, else far below."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        mean, scores = inputs.mean((1, 2, 3)), torch.full((len(inputs), 10), -9.0, dtype=inputs.dtype)
        scores[:, 3], scores[:, 4] = mean, -mean
        return scores


def test_the_best_classes_come_first_with_their_probabilities() -> None:
    found = best_classes(torch.tensor([1.0, 3.0, 2.0]), ("a", "b", "c"), 2)
    assert [name for name, _ in found] == ["b", "c"]
    whole = sum(np.exp([1.0, 3.0, 2.0]))
    assert [share for _, share in found] == pytest.approx([np.exp(3) / whole, np.exp(2) / whole], rel=1e-12)
    assert sum(share for _, share in best_classes(torch.tensor([1.0, 3.0, 2.0]), ("a", "b", "c"), 9)) == pytest.approx(
        1
    )


def test_scores_that_are_not_finite_are_no_prediction() -> None:
    with pytest.raises(UsageError, match="not finite"):
        best_classes(torch.tensor([1.0, float("nan")]), ("a", "b"), 1)


def test_each_file_has_a_prediction_or_an_error(tmp_path: Path) -> None:
    for name, value in (("white.png", 255), ("black.png", 0)):
        Image.fromarray(np.full((8, 8), value, np.uint8)).save(tmp_path / name)
    (tmp_path / "text.png").write_text("no image")
    files = [tmp_path / name for name in ("white.png", "missing.png", "text.png", "black.png")]
    found = list(predict(Brightness(), open_file_inputs(DataRecipe()), files, 2, torch.float64, nullcontext))
    assert [one.file for one in found] == files
    white, missing, text, black = found
    assert [name for name, _ in white.classes] == ["3", "4"]
    assert white.classes[0].probability / white.classes[1].probability == pytest.approx(np.exp(2))
    assert black.classes[0].probability == pytest.approx(black.classes[1].probability)
    assert missing == FilePrediction(
        files[1], (), "No such file or directory; give the path of a file that can be read"
    )
    assert text.classes == ()
    assert text.error.startswith("it is no image in a format that Pillow knows; the run takes images")
