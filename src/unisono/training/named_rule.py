"""Rules that a recipe names, made from its options, and whether ranks outlive others. Needs neither PyTorch nor MPI.

rule of the table    made here, from the recipe
module:function      made by the ranks; the launcher asks a process of its own: an import of MPI would begin MPI there
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields

from unisono.rules import BaseRule, Exchange, find_rule
from unisono.rules.asynchronous import has_servers
from unisono.training.recipe import OWN, Recipe, RuleRecipe
from unisono.user_function import UserFunction, is_user_function

COMMON_KEYS = ("name", "folder", "overlap")
"""Keys of a recipe's rule that do not belong to one rule."""


def exchange_of(recipe: Recipe) -> Exchange:
    """Return the exchange of a recipe's gradients."""
    options = recipe.exchange
    wire, megabytes = None if options.wire == OWN else options.wire, options.bucket_megabytes
    return Exchange(options.algorithm, wire, max(1, int(megabytes * (1 << 20))) if megabytes else None)


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


def own_rule(rule: RuleRecipe) -> UserFunction:
    """Return the user's function that makes the rule, as the recipe names it."""
    return UserFunction("rule", rule.name, rule.folder, "a rule", "rules:largest", "exchange, overlap")


LIMIT_SECONDS = 60.0
"""Longest time to make a rule of the user's own."""

ASYNCHRONOUS = 10
"""Exit code of the process that has made an asynchronous rule."""

PROGRAM = "import sys; from unisono.training.named_rule import answer; sys.exit(answer(*sys.argv[1:]))"


def survives_deaths(options: RuleRecipe) -> bool:
    """Return True for a recipe's rule that is asynchronous. A rule of the user's own that cannot be made is not: the
    ranks report why."""
    if not is_user_function(options.name):
        return has_servers(named_rule(options, Exchange()))
    command = [sys.executable, "-c", PROGRAM, options.name, options.folder, options.overlap]
    try:
        asked = subprocess.run(command, input=b"", capture_output=True, timeout=LIMIT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return False
    return asked.returncode == ASYNCHRONOUS


def answer(name: str, folder: str, overlap: str) -> int:
    """Return the exit code for a rule of the user's own: ASYNCHRONOUS, or 0."""
    rule = own_rule(RuleRecipe(name, folder)).call(Exchange(), overlap)
    return ASYNCHRONOUS if isinstance(rule, BaseRule) and has_servers(rule) else 0
