"""Rules, which define what ranks exchange and when. Each rule has one file, and one row here."""

from typing import TYPE_CHECKING

from unisono.registry import Registry, lazily

if TYPE_CHECKING:
    from unisono.rules.base import BaseRule
    from unisono.rules.bsp import BSP
    from unisono.rules.exchange import Exchange
    from unisono.rules.local_sgd import LocalSGD

__all__ = ["BSP", "RULES", "BaseRule", "Exchange", "LocalSGD", "find_rule"]

RULES = Registry(
    "rule",
    {
        "bsp": "unisono.rules.bsp:BSP",
        "local_sgd": "unisono.rules.local_sgd:LocalSGD",
    },
)
"""Rules by name. Each is a class that inherits from `BaseRule`."""

__getattr__ = lazily(
    __name__,
    {
        "BSP": "unisono.rules.bsp",
        "BaseRule": "unisono.rules.base",
        "Exchange": "unisono.rules.exchange",
        "LocalSGD": "unisono.rules.local_sgd",
    },
)


def find_rule(name: str) -> "type[BaseRule]":
    """Return the rule of that name. Raises UsageError, listing the names, for an unknown one."""
    found: type[BaseRule] = RULES.load(name)
    return found
