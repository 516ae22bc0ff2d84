from __future__ import annotations

from math import log

from unisono.training.accuracy import Accuracy
from unisono.training.results import describe_speed, describe_test, last_line, result_metrics, result_rows


def test_classes_are_reported_by_accuracy() -> None:
    found = result_metrics(Accuracy(0.981, 0.9995, 0.05), 1234.5, 1)
    assert found == {
        "test_accuracy": 0.981,
        "test_top5": 0.9995,
        "test_loss": 0.05,
        "samples_per_second": 1234.5,
    }
    assert describe_test(found) == "test accuracy 98.10% (top-5 99.95%)"
    assert describe_speed(found) == "1,234 samples/s"
    assert [name for name, _ in result_rows(found)] == ["test accuracy", "test accuracy, top-5", "samples per second"]
    assert last_line(found) == "test accuracy: 98.1%"
    few = result_metrics(Accuracy(0.981, None, 0.05), 1234.5, 1)
    assert "test_top5" not in few
    assert describe_test(few) == "test accuracy 98.10%"


def test_texts_are_reported_by_perplexity_and_tokens() -> None:
    found = result_metrics(Accuracy(0.4, 0.7, log(6.5)), 100.0, 64)
    assert found["tokens_per_second"] == 6400
    assert describe_test(found) == "test perplexity 6.50"
    assert describe_speed(found) == "6,400 tokens/s"
    assert result_rows(found) == [("test perplexity", "6.50"), ("tokens per second", "6,400")]
    assert last_line(found) == "test perplexity: 6.50"
