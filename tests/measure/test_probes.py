"""Prepared probes: products have their FLOPs, calls give their seconds, and a file leaves nothing behind."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from unisono.measure.probe_plan import plan_probe
from unisono.measure.probes import DecodingProbe, DiskProbe, MemoryProbe, ProductProbe
from unisono.placement import place
from unisono.plan.layer_costs import shape_of_product
from unisono.plan.trace import trace

FIRST: Any = SimpleNamespace(rank=0, node=0, placement=place([0, 0]))
"""World of the first rank of a node, as far as probes look at it."""
SECOND: Any = SimpleNamespace(rank=1, node=0, placement=place([0, 0]))

PRODUCTS = next(part.probes for part in plan_probe(60, 1, 1, disk=False).parts if part.name == "products")


@pytest.mark.parametrize("probe", PRODUCTS, ids=lambda probe: probe.words)
def test_a_probe_has_the_shape_and_the_flops_of_its_layer(probe: ProductProbe) -> None:
    if probe.kind == "linear":
        layer: nn.Module = nn.Linear(probe.inputs, probe.outputs, bias=False)
        inputs = torch.empty(probe.samples, probe.inputs, device="meta", requires_grad=True)
    else:
        layer = nn.Conv2d(probe.inputs, probe.outputs, probe.kernel, padding=probe.kernel // 2, bias=False)
        inputs = torch.empty(probe.samples, probe.inputs, probe.side, probe.side, device="meta", requires_grad=True)
    (traced,) = trace(layer, inputs)
    assert (traced.forward_flops, traced.backward_flops) == (probe.work, 2 * probe.work)
    shape = (probe.kind, probe.rows, probe.inner, probe.outputs, probe.kernel**2)
    assert shape_of_product(traced) == shape


@pytest.mark.parametrize("probe", [ProductProbe("linear", 2, 3, 4), ProductProbe("convolution", 2, 3, 4, 8, 3)])
def test_a_product_has_the_seconds_of_both_passes(probe: ProductProbe) -> None:
    with probe.prepare(FIRST, None) as call:
        assert len(call()) == 2
        assert all(seconds > 0 for seconds in call())


def test_a_sum_and_an_image_have_the_seconds_of_a_call() -> None:
    with MemoryProbe(4096).prepare(FIRST, None) as call:
        assert len(call()) == 1
    with DecodingProbe(64, 48).prepare(FIRST, None) as call:
        (seconds,) = call()
        assert seconds > 0


def test_a_file_is_read_and_nothing_is_left(tmp_path: Path) -> None:
    with DiskProbe(8 << 20).prepare(FIRST, tmp_path) as call:
        (seconds,) = call()
        assert seconds > 0
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), DiskProbe(4 << 20).prepare(FIRST, tmp_path):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_other_ranks_of_a_node_read_nothing(tmp_path: Path) -> None:
    with DiskProbe(8 << 20).prepare(SECOND, tmp_path / "nowhere") as call:
        assert call() == ()
    with pytest.raises(OSError, match="nowhere"), DiskProbe(8).prepare(FIRST, tmp_path / "nowhere"):
        pass
