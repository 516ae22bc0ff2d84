"""Predictions of the papers' figures by the project's equations and plans, for `unisono papers`.

python -m benchmarks.seeds.run
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.seeds import gpu_systems, pcl_dnn, swcaffe
from benchmarks.seeds.theirs import Predictions

import unisono.papers
from unisono.papers.figures import PREDICTED, PaperPrediction
from unisono.tables import known

FILE = Path(unisono.papers.__file__).with_name(PREDICTED)

DIGITS = 4
"""Significant digits of a prediction that is no whole number."""


def predictions() -> Predictions:
    """Return the predictions of all papers."""
    return {**gpu_systems.predictions(), **pcl_dnn.predictions(), **swcaffe.predictions()}


def as_data(tables: Predictions) -> dict[str, Any]:
    """Return predictions as data for JSON, with few digits."""
    return {name: {quantity: known(_rounded(row)) for quantity, row in rows.items()} for name, rows in tables.items()}


def _rounded(prediction: PaperPrediction) -> PaperPrediction:
    ours, fitted = (
        value if value is None or value == int(value) else float(f"{value:.{DIGITS}g}")
        for value in (prediction.ours, prediction.fitted)
    )
    return replace(prediction, ours=ours, fitted=fitted)


if __name__ == "__main__":
    FILE.write_text(json.dumps(as_data(predictions()), indent=1) + "\n", encoding="utf-8")
