from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from unisono.training.scoring.class_prediction import predict_class
from unisono.training.scoring.network_prediction import PredictOptions


def test_a_sample_has_its_most_probable_classes() -> None:
    sample = torch.tensor([[0.0, 2.0, 1.0]])
    found = predict_class(
        torch.nn.Identity(), sample, ("cat", "dog", "owl"), PredictOptions(2, 1, torch.float64, nullcontext)
    )
    dog, owl = found.classes
    assert (dog.name, owl.name) == ("dog", "owl")
    assert dog.probability / owl.probability == pytest.approx(2.718281828459045)
    assert found.words() == "dog 66.52%  owl 24.47%"
    assert found.as_data() == {
        "classes": [{"class": "dog", "probability": dog.probability}, {"class": "owl", "probability": owl.probability}]
    }
