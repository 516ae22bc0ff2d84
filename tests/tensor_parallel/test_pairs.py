"""Pairs are found where a Sequential shows that nothing else reads what flows between two layers."""

from __future__ import annotations

import torch
from torch import nn

from unisono.tensor_parallel.pairs import pairs_of


def once(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_modules()}


def pairs(*layers: nn.Module) -> dict[str, str]:
    model = nn.Sequential(*layers)
    return pairs_of(model, once(model))


def fc() -> nn.Linear:
    return nn.Linear(4, 4)


def test_linear_layers_with_elementwise_modules_between() -> None:
    assert pairs(fc(), fc()) == {"0": "1"}
    assert pairs(fc(), nn.ReLU(), nn.Dropout(), fc(), nn.GELU(), fc()) == {"0": "3", "3": "5"}
    nested = nn.ModuleDict({"head": nn.Sequential(nn.Flatten(), fc(), nn.Tanh(), fc())})
    assert pairs_of(nested, once(nested)) == {"head.1": "head.3"}


def test_modules_that_need_all_features_are_not_crossed() -> None:
    for between in (
        nn.LayerNorm(4),
        nn.Softmax(-1),
        nn.Flatten(),
        nn.PReLU(),
        nn.Sequential(nn.ReLU()),
        nn.Conv1d(4, 4, 1),
    ):
        assert pairs(fc(), between, fc()) == {}


def test_what_others_may_read_is_not_paired() -> None:
    relu, first = nn.ReLU(), fc()
    assert pairs(first, relu, fc(), relu, fc()) == {"0": "2"}  # the second has another name
    twice = nn.Sequential(first, relu, fc(), relu, fc())
    assert pairs_of(twice, once(twice) - {"1"}) == {}
    norm = nn.LayerNorm(4)
    assert pairs(norm, fc(), norm, fc()) == {}
    assert pairs(first, nn.ReLU(), first) == {}
    seen = fc()
    seen.register_forward_hook(lambda *_: None)
    assert pairs(seen, fc()) == {}

    class Skipping(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + super().forward(x)

    odd = Skipping(fc(), fc())
    assert pairs_of(odd, once(odd)) == {}
    model = nn.Sequential(fc(), nn.ReLU(), fc())
    for name in ("", "0", "1", "2"):
        assert pairs_of(model, once(model) - {name}) == {}
