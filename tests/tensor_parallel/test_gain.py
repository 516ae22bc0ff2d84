"""The table of the gain: a row for each part, the ratio of unsplit to split, and a mark at what is predicted."""

from __future__ import annotations

from unisono.tensor_parallel.gain import LayerGain, describe_gain

GAINS = [
    LayerGain("classifier.1", "forward", 1.1e-3, 1.21e-3),
    LayerGain("classifier.1", "backward", 2e-3, 3e-3, measured=False),
    LayerGain("classifier.1", "activations", 0.6e-3, 0.0),
    LayerGain("classifier.1", "gradients", 0.0, 9.8e-3, measured=False),
    LayerGain("classifier.1", "together", 3.7e-3, 14.01e-3, measured=False),
]


def test_the_table() -> None:
    assert [" ".join(line.split()) for line in describe_gain(GAINS)] == [
        "layer part split ms unsplit ms ratio",
        "classifier.1 forward 1.10 1.21 1.10",
        "backward 2.00 ~3.00 1.50",
        "activations 0.60 0.00 0.00",
        "gradients ~0.00 ~9.80",
        "together 3.70 ~14.01 3.79",
    ]
    assert len({len(line) for line in describe_gain(GAINS)}) == 1
    assert describe_gain([]) == []
