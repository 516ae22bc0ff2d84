"""Measured bounds."""

import pytest
import torch

from unisono.bench import peak
from unisono.bench.peak import Peak, fastest, measure_peak

BOTH = Peak(operations_per_second=100.0, bytes_per_second=10.0)


def test_the_longer_of_both_is_the_bound() -> None:
    assert BOTH.least_seconds(operations=200, least_bytes=10) == 2.0
    assert not BOTH.memory_bound(operations=200, least_bytes=10)
    assert BOTH.least_seconds(operations=100, least_bytes=30) == 3.0
    assert BOTH.memory_bound(operations=100, least_bytes=30)


def test_the_first_attempt_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0, 1, 0, 5, 0, 3, 0, 4, 0, 6, 0, 7])
    monkeypatch.setattr(peak.time, "perf_counter", lambda: next(now))
    assert fastest(lambda: None) == 3


def test_a_measured_peak_is_positive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak, "MATMUL_SIZES", [(64, 32, 16)])
    monkeypatch.setattr(peak, "CONVOLUTION_SIZE", (1, 4, 8))
    monkeypatch.setattr(peak, "COPY_BYTES", 1 << 16)
    found = measure_peak(torch.float32)
    assert found.operations_per_second > 0
    assert found.bytes_per_second > 0


def test_the_best_of_products_is_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak, "MATMUL_SIZES", [(10, 20, 30), (100, 20, 30)])
    monkeypatch.setattr(peak, "CONVOLUTION_SIZE", (2, 5, 4))
    seconds = {"products": iter([4.0, 10.0]), "others": iter([100.0, 2.0])}
    monkeypatch.setattr(peak, "fastest", lambda work: next(seconds["products"], None) or next(seconds["others"]))
    monkeypatch.setattr(peak, "COPY_BYTES", 1 << 10)
    found = measure_peak(torch.float32)
    assert found.operations_per_second == 2 * 100 * 20 * 30 / 10
    assert found.bytes_per_second == 2 * 1024 / 2
