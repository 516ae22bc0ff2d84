"""States as tensors and JSON: each memory once, nothing pickled, and what cannot be kept is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from unisono.errors import CheckpointError
from unisono.training.checkpoint.files import (
    check_state,
    copied,
    flatten_state,
    load_newest,
    load_weights,
    save,
    unflatten_state,
)
from unisono.training.checkpoint.layout import Checkpoint

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
TENSORS = st.integers(0, 4).map(lambda size: torch.arange(float(size)))
KEYS = st.text(max_size=4) | st.integers() | st.booleans() | st.none()
NESTED = st.recursive(
    SCALARS | TENSORS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


def same(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(value, other)
    if isinstance(value, dict):
        return type(other) is dict and list(value) == list(other) and all(same(value[key], other[key]) for key in value)
    if isinstance(value, list | tuple):
        return type(value) is type(other) and len(value) == len(other) and all(map(same, value, other))
    return type(value) is type(other) and value == other


@given(NESTED)
def test_what_was_taken_apart_is_put_together(value: Any) -> None:
    tensors, outline = flatten_state(value, "it")
    assert same(value, unflatten_state(json.loads(json.dumps(outline)), tensors))


class Tied(nn.Module):
    """As language models: the decoder has the encoder's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Embedding(7, 3), nn.Linear(3, 7)
        self.decode.weight = self.encode.weight
        self.register_buffer("row", self.encode.weight.detach()[2])


class Extra(nn.Module):
    def __init__(self, extra: Any = None) -> None:
        super().__init__()
        self.layer, self.extra = nn.Linear(3, 2), extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def saved_and_loaded(model: nn.Module, folder: Path) -> dict[str, Any]:
    optimizer = optimizer_of(model)
    check_state(model, optimizer)
    save(folder, Checkpoint(1, model.state_dict(), optimizer.state_dict(), {}))
    return load_newest(folder)[0].weights


def test_tied_weights_are_kept_once(tmp_path: Path) -> None:
    model, fresh = Tied(), Tied()
    fresh.load_state_dict(saved_and_loaded(model, tmp_path))
    assert all(torch.equal(value, fresh.state_dict()[name]) for name, value in model.state_dict().items())
    size = (tmp_path / "step-000000001/weights.safetensors").stat().st_size
    assert size < 8 + 400 + 4 * (7 * 3 + 7 + 3) + 8, "the common memory once, and the row as a copy"


@pytest.mark.parametrize(
    "extra",
    [
        {"version": 3},
        None,
        [1, (2.5, "three"), {"four": [None, True]}],
        {"scale": torch.tensor([1.0, 2.0]), "history": [torch.zeros(2, 2), torch.ones(0)], 7: "seven"},
        torch.arange(5, dtype=torch.uint8),
    ],
)
def test_extra_state_is_kept(tmp_path: Path, extra: Any) -> None:
    fresh = Extra()
    fresh.load_state_dict(saved_and_loaded(nn.Sequential(Extra(extra)), tmp_path), strict=False)
    fresh = nn.Sequential(Extra())
    fresh.load_state_dict(load_newest(tmp_path)[0].weights)
    assert same(extra, fresh[0].extra)


class Versioned(nn.Linear):
    """As torchvision's MNASNet: its weights are loaded by their version."""

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
        self.seen = metadata.get("version")
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def test_modules_see_the_version_that_their_weights_were_saved_by(tmp_path: Path) -> None:
    model, fresh = (nn.Sequential(Versioned(3, 2)) for _ in range(2))
    model[0]._version, fresh[0]._version = 2, 3
    for weights in (saved_and_loaded(model, tmp_path), copied(model.state_dict())):
        load_weights(fresh, weights)
        assert fresh[0].seen == 2
        assert torch.equal(fresh[0].weight, model[0].weight)
    load_weights(fresh, dict(model.state_dict()))  # as of an older release
    assert fresh[0].seen == 3


class Own:
    """Only a pickle could hold it."""


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: nn.Sequential(Extra({"cache": [1, Own()]})), r"'0._extra_state'\['cache'\]\[1\] is of type .*Own"),
        (lambda: Extra({1, 2}), "'_extra_state' is of type builtins.set"),
        (lambda: Extra({(1, 2): 3}), r"'_extra_state'\[\(1, 2\)\] has a key of type tuple"),
        (lambda: Extra(torch.zeros(2, 2).to_sparse()), "'_extra_state' is a tensor of torch.float32, torch.sparse_coo"),
        (lambda: nn.Linear(2, 2, device="meta"), "'weight' is a tensor of torch.float32, torch.strided, on meta"),
        (lambda: nn.LazyLinear(2), "'weight' has no size before the model is called once"),
    ],
)
def test_what_no_checkpoint_can_hold_is_refused_by_name(model: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"the model cannot be checkpointed: {message}"):
        check_state(model(), optimizer_of(nn.Linear(1, 1)))


def test_extra_state_that_could_not_be_given_back(tmp_path: Path) -> None:
    class Half(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"version": 3}

    with pytest.raises(CheckpointError, match=r"Half \(0\) has get_extra_state, but no set_extra_state"):
        check_state(nn.Sequential(Half(2, 2)), optimizer_of(nn.Linear(1, 1)))


def test_an_optimizer_with_other_values(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(3, 2)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    save(tmp_path, Checkpoint(1, model.state_dict(), optimizer.state_dict(), {}))
    loaded = load_newest(tmp_path)[0].optimizer
    assert same({**optimizer.state_dict()}, loaded)
    optimizer.param_groups[0]["schedule"] = lambda step: step
    with pytest.raises(CheckpointError, match=r"'param_groups'\[0\]\['schedule'\] is of type builtins.function"):
        check_state(model, optimizer)
