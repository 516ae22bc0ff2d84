"""Rules: what ranks exchange and when. One rule, one file, one row here."""

from collections.abc import Mapping

from unisono.errors import UsageError
from unisono.rules.base import BaseRule
from unisono.rules.bsp import BSP
from unisono.rules.exchange import Exchange
from unisono.rules.local_sgd import LocalSGD

__all__ = ["BSP", "RULES", "BaseRule", "Exchange", "LocalSGD", "find_rule"]

RULES: Mapping[str, type[BaseRule]] = {"bsp": BSP, "local_sgd": LocalSGD}


def find_rule(name: str) -> type[BaseRule]:
    """Return the rule of that name. Raises UsageError, listing the names, for an unknown one."""
    if name not in RULES:
        raise UsageError(f"there is no rule {name!r}; there are {', '.join(RULES)}")
    return RULES[name]
