"""Pairs of linear layers that can be split with nothing sent between, where a Sequential shows all that is there.

    Sequential   Linear  ReLU  Dropout  Linear  LayerNorm  Linear
                 └── column ───▶ row ──────┘               not after a norm, which needs all features

The output of the first has to go through modules that work on each feature by itself, and nowhere else. A Sequential
that runs calls its children one after another, so that is known; of other modules it is not, and none of theirs are
paired.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

NAMES = (
    "CELU Dropout ELU GELU Hardsigmoid Hardswish Hardtanh Identity LeakyReLU LogSigmoid Mish ReLU ReLU6 SELU SiLU "
    "Sigmoid Softplus Tanh"
)
ELEMENTWISE = {getattr(nn, name) for name in NAMES.split()}
"""Modules without weights that work on each feature by itself."""


def pairs_of(model: nn.Module, once: Collection[str]) -> dict[str, str]:
    """Return the name of the second layer of each pair, by that of the first. A layer may be in two.

    `once` has the modules that a forward pass calls once, by their own names: others are in no pair.
    """
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        if type(module) is not nn.Sequential or name not in once or module._forward_hooks:
            continue
        first: str | None = None
        for key, child in module._modules.items():  # with those that stand there twice
            own = f"{name}.{key}" if name else key
            assert child is not None, "a Sequential calls all its modules"
            alone = names[id(child)] == own and own in once and not child._forward_hooks
            if alone and type(child) is nn.Linear:
                if first is not None:
                    found[first] = own
                first = own
            elif not alone or type(child) not in ELEMENTWISE:
                first = None
    return found
