"""Prepared probes: products have their FLOPs, calls give their seconds, and a file leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from unisono.measure.prepare import prepare_decoding, prepare_product, prepare_read, prepare_sum
from unisono.measure.probes import DecodingProbe, DiskProbe, MemoryProbe, ProductProbe, plan_probe
from unisono.plan.layer_costs import shape_of_product
from unisono.plan.trace import trace

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
    with prepare_product(probe) as (call, _):
        assert len(call()) == 2
        assert all(seconds > 0 for seconds in call())


def test_a_sum_and_an_image_have_the_seconds_of_a_call() -> None:
    with prepare_sum(MemoryProbe(4096)) as (call, _):
        assert len(call()) == 1
    with prepare_decoding(DecodingProbe(64, 48)) as (call, _):
        (seconds,) = call()
        assert seconds > 0


def test_a_file_is_read_and_nothing_is_left(tmp_path: Path) -> None:
    with prepare_read(DiskProbe(8 << 20), tmp_path, reads=True) as (call, _):
        (seconds,) = call()
        assert seconds > 0
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), prepare_read(DiskProbe(4 << 20), tmp_path, reads=True):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_other_ranks_of_a_node_read_nothing(tmp_path: Path) -> None:
    with prepare_read(DiskProbe(8 << 20), tmp_path / "nowhere", reads=False) as (call, _):
        assert call() == ()
    with pytest.raises(OSError, match="nowhere"), prepare_read(DiskProbe(8), tmp_path / "nowhere", reads=True):
        pass
