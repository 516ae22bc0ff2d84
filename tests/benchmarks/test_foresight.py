"""Networks of the sealed predictions."""

from pathlib import Path

import pytest


def test_gradients_are_made_smaller_with_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks/foresight")
    import ranks
    from settings import Cluster, Run

    layers = ranks.small_layers(Run("alexnet", 8, "bsp", ""), Cluster(1, 2, 100, 1, 0.0))
    assert [layer.gradient_bytes for layer in layers] == [layer.parameter_bytes for layer in layers]
