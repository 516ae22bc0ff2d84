"""Prepared probes: products have their FLOPs, calls give their seconds, and a file leaves nothing behind."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from unisono.measure.probes import (
    CONVOLUTION_SIZES,
    LINEAR_SIZES,
    Probe,
    copy_probe,
    decoding_probe,
    disk_probe,
    memory_probe,
    product_probe,
)
from unisono.placement import place
from unisono.plan.planned_run import shape_of_product
from unisono.plan.trace import trace

FIRST: Any = SimpleNamespace(rank=0, node=0, placement=place([0, 0]))
"""World of the first rank of a node, as far as probes look at it."""
SECOND: Any = SimpleNamespace(rank=1, node=0, placement=place([0, 0]))


@pytest.mark.parametrize("sizes", [*LINEAR_SIZES, *CONVOLUTION_SIZES])
def test_a_probe_has_the_shape_and_the_flops_of_its_layer(sizes: tuple[int, ...]) -> None:
    samples, inputs, outputs, *square = sizes
    if square:
        side, kernel = square
        layer: nn.Module = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
        given = torch.empty(samples, inputs, side, side, device="meta", requires_grad=True)
    else:
        layer = nn.Linear(inputs, outputs, bias=False)
        given = torch.empty(samples, inputs, device="meta", requires_grad=True)
    (traced,) = trace(layer, given).layers
    probe = product_probe("convolution" if square else "linear", *sizes)
    assert (traced.forward_flops, traced.backward_flops) == (probe.work, 2 * probe.work)
    assert (*(shape_of_product(traced) or ()), "float32") == probe.row


@pytest.mark.parametrize("probe", [product_probe("linear", 2, 3, 4), product_probe("convolution", 2, 3, 4, 8, 3)])
def test_a_product_has_the_seconds_of_both_passes(probe: Probe) -> None:
    with probe.prepare(FIRST, None) as call:
        assert len(call()) == 2
        assert all(seconds > 0 for seconds in call())


def test_a_sum_and_an_image_have_the_seconds_of_a_call() -> None:
    with memory_probe(4096).prepare(FIRST, None) as call:
        assert len(call()) == 1
    with decoding_probe(64, 48).prepare(FIRST, None) as call:
        (seconds,) = call()
        assert seconds > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_of_a_device(device: torch.device, dtype: str) -> None:
    linear = product_probe("linear", 2, 3, 4, dtype=dtype, device=device)
    convolution = product_probe("convolution", 2, 3, 4, 8, 3, dtype=dtype, device=device)
    for probe in (linear, convolution):
        assert probe.row[-1] == dtype
        assert probe.label.endswith(" in bfloat16") == (dtype == "bfloat16")
        with probe.prepare(FIRST, None) as call:
            assert len(call()) == 2
            assert all(seconds > 0 for seconds in call())


def test_copies_and_memory_of_a_device(device: torch.device) -> None:
    probes = memory_probe(4096, device), *(copy_probe(kind, 4096, device) for kind in ("to_host", "to_device"))
    assert [probe.kind for probe in probes] == ["device_memory", "to_host", "to_device"]
    for probe in probes:
        with probe.prepare(FIRST, None) as call:
            assert len(call()) == 1


def test_a_file_is_read_and_nothing_is_left(tmp_path: Path) -> None:
    with disk_probe(8 << 20).prepare(FIRST, tmp_path) as call:
        (seconds,) = call()
        assert seconds > 0
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), disk_probe(4 << 20).prepare(FIRST, tmp_path):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_other_ranks_of_a_node_read_nothing(tmp_path: Path) -> None:
    with disk_probe(8 << 20).prepare(SECOND, tmp_path / "nowhere") as call:
        assert call() == ()
    with pytest.raises(OSError, match="nowhere"), disk_probe(8).prepare(FIRST, tmp_path / "nowhere"):
        pass
