"""Rules that a recipe names, made from its options. Needs neither PyTorch nor MPI."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from unisono.rules import BaseRule, Exchange, find_rule

if TYPE_CHECKING:
    from unisono.training.recipe import RuleRecipe


def named_rule(options: RuleRecipe, exchange: Exchange) -> BaseRule:
    """Return the rule of a recipe, with those of its options that the rule has.

    Raises UsageError for an unknown name, and for options that do not fit together.
    """
    kind = find_rule(options.name)
    names = {entry.name for entry in fields(kind)} - {entry.name for entry in fields(BaseRule)}
    return kind(exchange, options.overlap, **{key: getattr(options, key) for key in names if hasattr(options, key)})
