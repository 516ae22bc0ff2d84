"""Pairs of linear layers that can be split with nothing sent between, where a Sequential shows all that is there.

    Sequential   Linear  ReLU  Dropout  Linear  LayerNorm  Linear
                 └── column ───▶ row ──────┘               not after a norm, which needs all features

The output of the first has to go through modules that work on each feature by itself, and nowhere else. A Sequential
that runs calls its children one after another, so that is known; of other modules it is not, and none of theirs are
paired.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

ELEMENTWISE = (
    nn.CELU,
    nn.Dropout,
    nn.ELU,
    nn.GELU,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Hardtanh,
    nn.Identity,
    nn.LeakyReLU,
    nn.LogSigmoid,
    nn.Mish,
    nn.ReLU,
    nn.ReLU6,
    nn.SELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Tanh,
)
"""Modules without weights that work on each feature by itself."""


def pairs_of(model: nn.Module, calls: Mapping[str, int]) -> dict[str, str]:
    """Return the name of the second layer of each pair, by that of the first. A layer may be in two.

    `calls` has the calls of each module in a forward pass: what is called twice, or not by its own name, is in none.
    """
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        if type(module) is not nn.Sequential or calls.get(name) != 1 or module._forward_hooks:
            continue
        first: str | None = None
        for key, child in module._modules.items():  # with those that stand there twice
            own = f"{name}.{key}" if name else key
            assert child is not None, "a Sequential calls all its modules"
            alone = names[id(child)] == own and calls.get(own) == 1 and not child._forward_hooks
            if alone and type(child) is nn.Linear:
                if first is not None:
                    found[first] = own
                first = own
            elif not alone or type(child) not in ELEMENTWISE:
                first = None
    return found
