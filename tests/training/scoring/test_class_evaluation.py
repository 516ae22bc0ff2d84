from __future__ import annotations

import json

import numpy as np
import pytest

from unisono.training.accuracy import Accuracy
from unisono.training.scoring.class_evaluation import CONFUSION, ClassEvaluation

FOUND = ClassEvaluation(
    samples=8,
    accuracy=Accuracy(0.625, None, 0.61234),
    classes=("cat", "dog", "owl"),
    confusion=np.array([[3, 1, 0], [2, 2, 0], [0, 0, 0]]),
)


def test_data_has_each_class_and_the_confusion() -> None:
    data = json.loads(json.dumps(FOUND.as_data(), allow_nan=False))
    assert (data["samples"], data["loss"], data["top1"], data["top5"]) == (8, 0.61234, 0.625, None)
    assert data["classes"] == [
        {"class": "cat", "samples": 4, "recall": 0.75, "precision": 0.6},
        {"class": "dog", "samples": 4, "recall": 0.5, "precision": pytest.approx(2 / 3)},
        {"class": "owl", "samples": 0, "recall": None, "precision": None},
    ]
    assert data["confusion"] == [[3, 1, 0], [2, 2, 0], [0, 0, 0]]


def test_the_table_names_the_weakest_class_and_the_mistakes() -> None:
    assert list(FOUND.rows()) == [
        ("samples", "8"),
        ("loss", "0.6123"),
        ("top-1 accuracy", "62.50%"),
        ("lowest recall", "dog: 50.00%"),
        ("mistake", "dog as cat: 2"),
        ("mistake", "cat as dog: 1"),
    ]
    six = ClassEvaluation(
        samples=6, accuracy=Accuracy(1.0, 1.0, 0.1), classes=tuple("abcdef"), confusion=np.eye(6, dtype=np.int64)
    )
    assert list(six.rows())[3:] == [("top-5 accuracy", "100.00%"), ("lowest recall", "a: 100.00%")]


def test_the_picture_has_the_run_and_its_accuracy_in_its_title() -> None:
    assert "pets, step 7: top-1 62.50%" in FOUND.images("pets, step 7")[CONFUSION]
