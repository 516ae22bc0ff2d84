"""Options of rules, as recipes name them: the fields of a rule's dataclass that are numbers, words, or true or false.

    class DiLoCo(LocalSGD):                        [rule]
        delay: int = number(1, at_least=0)         name = "diloco"
                                                   delay = 2

So a new rule is one file and one row of the table: its keys, defaults and limits are those of its dataclass.
"""

from __future__ import annotations

from dataclasses import Field, fields
from typing import Any, get_type_hints

from unisono.rules import RULES, BaseRule, find_rule

KINDS = (bool, int, float, str)
"""Types of options."""


def own_options(name: str) -> dict[str, Field[Any]]:
    """Return the options of a rule by their names; none for a rule that is not in the table."""
    if name not in RULES:
        return {}
    rule = find_rule(name)
    common, hints = {option.name for option in fields(BaseRule)}, get_type_hints(rule)
    own = (option for option in fields(rule) if option.name not in common)
    return {option.name: option for option in own if hints[option.name] in KINDS}


def all_options(name: str) -> dict[str, Field[Any]]:
    """Return the options of all rules by their names; where several have a name, that of the rule `name` if it has it.

    A recipe may have those of other rules, which have no effect: a sweep over rules gives all of them the same keys.
    """
    options = dict[str, Field[Any]]()
    for rule in (name, *RULES):
        options |= {key: option for key, option in own_options(rule).items() if key not in options}
    return options
