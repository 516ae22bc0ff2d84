from __future__ import annotations

from math import inf

from unisono.training.measures import ACCURACY, PERPLEXITY, measure_of

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
