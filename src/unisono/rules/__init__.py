"""Rules, which define what ranks exchange and when. Each rule has one file, and one row here.

Options of rules, as recipes name them, are the fields of a rule's dataclass that are numbers, words, or true or false:

    class DiLoCo(LocalSGD):                        [rule]
        delay: int = number(1, at_least=0)         name = "diloco"
                                                   delay = 2

So a new rule's keys, defaults and limits are those of its dataclass.
"""

from dataclasses import Field, fields
from typing import TYPE_CHECKING, Any, get_type_hints

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
    "all_options",
    "find_rule",
    "own_options",
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
    rule: type[BaseRule] = RULES.load(name)
    return rule


KINDS = (bool, int, float, str)
"""Types of options."""


def own_options(name: str) -> dict[str, Field[Any]]:
    """Return the options of a rule by their names; none for a rule that is not in the table."""
    if name not in RULES:
        return {}
    rule = find_rule(name)
    common, hints = {option.name for option in fields(__getattr__("BaseRule"))}, get_type_hints(rule)
    specific = (option for option in fields(rule) if option.name not in common)
    return {option.name: option for option in specific if hints[option.name] in KINDS}


def all_options(name: str) -> dict[str, Field[Any]]:
    """Return the options of all rules by their names; where several have a name, that of the rule `name` if it has it.

    A recipe may have those of other rules, which have no effect: a sweep over rules gives all of them the same keys.
    """
    options = dict[str, Field[Any]]()
    for rule in (name, *RULES):
        options |= {key: option for key, option in own_options(rule).items() if key not in options}
    return options
