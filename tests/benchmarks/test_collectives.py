"""Summary of the benchmark of collectives."""

from benchmarks.collectives.run import simulated


def test_prediction_against_measurement() -> None:
    ring, tree = {"simulated_us": 1210, "median_us": 1100}, {"simulated_us": None, "median_us": 900}
    rows = [{"bytes": nbytes, "contenders": {"ring": ring, "tree": tree}} for nbytes in (4, 1 << 20)]
    assert simulated({"sizes": rows}) == [("ring", 1 << 20, 1.1)]
