"""Rules, which define what ranks exchange and when. Each rule has one file, and one row here."""

from typing import TYPE_CHECKING

from unisono.registry import Registry, lazy_attributes

if TYPE_CHECKING:
    from unisono.rules.bsp import BSP
    from unisono.rules.diloco import DiLoCo
    from unisono.rules.easgd import EASGD
    from unisono.rules.local_sgd import LocalSGD
    from unisono.rules.sharded import Sharded
    from unisono.step.rule import BaseRule, Exchange

__all__ = [
    "BSP",
    "EASGD",
    "RULES",
    "BaseRule",
    "DiLoCo",
    "Exchange",
    "LocalSGD",
    "Sharded",
    "find_rule",
]

RULES = Registry(
    "rule",
    {
        "bsp": "unisono.rules.bsp:BSP",
        "sharded": "unisono.rules.sharded:Sharded",
        "easgd": "unisono.rules.easgd:EASGD",
        "local_sgd": "unisono.rules.local_sgd:LocalSGD",
        "diloco": "unisono.rules.diloco:DiLoCo",
    },
)
"""Rules by name. Each is a class that inherits from `BaseRule`."""

__getattr__ = lazy_attributes(
    __name__,
    {
        "BaseRule": "unisono.step.rule",
        "Exchange": "unisono.step.rule",
        **{name: module for module, name in (row.split(":") for row in RULES.values())},
    },
)


def find_rule(name: str) -> "type[BaseRule]":
    """Return the rule of that name. Raises UsageError, listing the names, for an unknown one."""
    found: type[BaseRule] = RULES.load(name)
    return found
