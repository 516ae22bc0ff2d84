"""Rules that a recipe names, made from its options. Needs neither PyTorch nor MPI."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from unisono.rules import BaseRule, Exchange, find_rule
from unisono.user_function import is_user_function

if TYPE_CHECKING:
    from unisono.training.recipe import RuleRecipe

COMMON_KEYS = ("name", "folder", "overlap")
"""Keys of a recipe's rule that do not belong to one rule."""


def named_rule(options: RuleRecipe, exchange: Exchange) -> BaseRule:
    """Return the rule of a recipe, with those of its options that the rule has.

    Raises UsageError for an unknown name, and for options that do not fit together.
    """
    keys = _own_keys(options)
    return find_rule(options.name)(exchange, options.overlap, **{key: getattr(options, key) for key in keys})


def describe_unused(options: RuleRecipe) -> list[str]:
    """Return a line for each key that a recipe sets and that its rule does not have: it has no effect.

    It is no error: a sweep over rules gives keys of one to the others too.
    """
    used = {*COMMON_KEYS, *_own_keys(options)}
    names = ", ".join(entry.name for entry in fields(options) if entry.name in used.difference(COMMON_KEYS))
    return [
        f"rule.{entry.name} = {getattr(options, entry.name)!r} has no effect with rule.name = {options.name!r}, which "
        f"has {names or 'no keys of its own'}"
        for entry in fields(options)
        if entry.name not in used and getattr(options, entry.name) != entry.default
    ]


def _own_keys(options: RuleRecipe) -> list[str]:
    """Return the keys of the recipe that only some rules have, and this one has."""
    if is_user_function(options.name):
        return []
    names = {entry.name for entry in fields(find_rule(options.name))} - {entry.name for entry in fields(BaseRule)}
    return [entry.name for entry in fields(options) if entry.name in names]
