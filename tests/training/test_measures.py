from __future__ import annotations

from math import inf, log

from unisono.training.accuracy import Accuracy
from unisono.training.measures import (
    ACCURACY,
    PERPLEXITY,
    describe_speed,
    describe_test,
    last_line,
    measure_of,
    result_metrics,
    result_rows,
)

IMAGES = {"test_accuracy": 0.5}
TEXTS = {"test_accuracy": 0.5, "test_perplexity": 4.0}


def test_runs_are_compared_by_what_all_of_them_have() -> None:
    assert measure_of([IMAGES, IMAGES]) is ACCURACY
    assert measure_of([TEXTS, TEXTS]) is PERPLEXITY
    assert measure_of([TEXTS, IMAGES]) is ACCURACY
    assert measure_of([]) is ACCURACY


def test_accuracies_are_better_if_higher_perplexities_if_lower() -> None:
    assert max([0.25, 0.75, 0.5], key=ACCURACY.merit) == 0.75
    assert max([4.0, 3.5, inf], key=PERPLEXITY.merit) == 3.5
    assert (ACCURACY.extreme, PERPLEXITY.extreme) == ("highest", "lowest")


def test_values_have_the_words_of_their_measure() -> None:
    assert (ACCURACY.words(0.981), PERPLEXITY.words(3.9512), PERPLEXITY.words(inf)) == ("98.10%", "3.95", "inf")
    assert (ACCURACY.metric, PERPLEXITY.title) == ("test_accuracy", "test perplexity")


def test_classes_are_reported_by_accuracy() -> None:
    metrics = result_metrics(Accuracy(0.981, 0.9995, 0.05), 1234.5, 1)
    assert metrics == {
        "test_accuracy": 0.981,
        "test_top5": 0.9995,
        "test_loss": 0.05,
        "samples_per_second": 1234.5,
    }
    assert describe_test(metrics) == "test accuracy 98.10% (top-5 99.95%)"
    assert describe_speed(metrics) == "1,234 samples/s"
    assert [name for name, _ in result_rows(metrics)] == ["test accuracy", "test accuracy, top-5", "samples per second"]
    assert last_line(metrics) == "test accuracy: 98.1%"
    few = result_metrics(Accuracy(0.981, None, 0.05), 1234.5, 1)
    assert "test_top5" not in few
    assert describe_test(few) == "test accuracy 98.10%"


def test_texts_are_reported_by_perplexity_and_tokens() -> None:
    metrics = result_metrics(Accuracy(0.4, 0.7, log(6.5)), 100.0, 64)
    assert metrics["tokens_per_second"] == 6400
    assert describe_test(metrics) == "test perplexity 6.50"
    assert describe_speed(metrics) == "6,400 tokens/s"
    assert result_rows(metrics) == [("test perplexity", "6.50"), ("tokens per second", "6,400")]
    assert last_line(metrics) == "test perplexity: 6.50"
