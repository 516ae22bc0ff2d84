"""The method of a taken layer has the layer weakly; a copy of the layer has a method of its own."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from tests.reducer.weight_first.alike import taken
from torch import nn

from unisono.errors import UsageError
from unisono.reducer.weight_first.taken import taken_of


def test_a_layer_is_freed_when_it_is_forgotten() -> None:
    layer = nn.Linear(2, 2)
    taken(layer)
    alive = weakref.ref(layer)
    gc.disable()
    try:
        del layer
        assert alive() is None
    finally:
        gc.enable()


def test_a_copy_has_its_own_layer_and_reports_to_none() -> None:
    for layer, name in ((nn.Linear(2, 2), "forward"), (nn.Conv2d(2, 2, 1), "_conv_forward")):
        taken(layer)
        for one in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            found = taken_of(one, name)
            assert found is not None
            assert found.layer is one
            assert found.readings.of(one.weight) is None


def test_a_method_without_its_layer_raises_an_error() -> None:
    layer = nn.Linear(2, 2)
    taken(layer)
    method = layer.forward
    del layer
    with pytest.raises(UsageError, match="forward of a layer that no longer exists"):
        method(torch.ones(2, 2))


def test_other_methods_are_not_taken() -> None:
    layer = nn.Linear(2, 2)
    assert taken_of(layer, "forward") is None
    vars(layer)["forward"] = layer.forward
    assert taken_of(layer, "forward") is None
