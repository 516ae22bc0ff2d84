"""Rules that a recipe names, made from its options, and whether ranks outlive others. Needs neither PyTorch nor MPI.

rule of the table    made here, from the recipe
module:function      made by the ranks; the launcher asks a process of its own: an import of MPI would begin MPI there
"""

from __future__ import annotations

import subprocess
import sys

from unisono.rules import BaseRule, Exchange, find_rule
from unisono.rules.asynchronous import has_servers
from unisono.rules.options import all_options, own_options
from unisono.training.recipe import OWN, Recipe, RuleRecipe
from unisono.user_function import UserFunction, is_user_function


def make_rule(recipe: Recipe) -> BaseRule:
    """Return the rule of a recipe, with those of its options that the rule has.

    Raises UsageError for an unknown name and for options that do not fit together, and RecipeError where the user's
    function returns no BaseRule.
    """
    options, exchange = recipe.rule, _exchange_of(recipe)
    if not is_user_function(options.name):
        mine = {key: options.options[key] for key in own_options(options.name)}
        return find_rule(options.name)(exchange, options.overlap, **mine)
    own = own_rule(options)
    rule = own.call(exchange, options.overlap)
    if not isinstance(rule, BaseRule):
        raise own.error(f"it gave {type(rule).__name__}, not a rule that inherits from unisono.rules.BaseRule")
    return rule


def _exchange_of(recipe: Recipe) -> Exchange:
    options = recipe.exchange
    wire, megabytes = None if options.wire == OWN else options.wire, options.bucket_megabytes
    return Exchange(options.algorithm, wire, max(1, int(megabytes * (1 << 20))) if megabytes else None)


def own_rule(rule: RuleRecipe) -> UserFunction:
    """Return the user's function that makes the rule, as the recipe names it."""
    return UserFunction("rule", rule.name, rule.folder, "a rule", "rules:largest", "exchange, overlap")


def describe_unused(options: RuleRecipe) -> list[str]:
    """Return a line for each key that a recipe sets and that its rule does not have: it has no effect.

    It is no error: a sweep over rules gives keys of one to the others too.
    """
    mine = own_options(options.name)
    return [
        f"rule.{key} = {options.options[key]!r} has no effect with rule.name = {options.name!r}, which has "
        f"{', '.join(mine) or 'no keys of its own'}"
        for key, one in all_options(options.name).items()
        if key not in mine and options.options[key] != one.default
    ]


LIMIT_SECONDS = 60.0
"""Longest time to make a rule of the user's own."""

ASYNCHRONOUS = 10
"""Exit code of the process that has made an asynchronous rule."""

PROGRAM = "import sys; from unisono.training.named_rule import answer; sys.exit(answer(*sys.argv[1:]))"


def survives_deaths(recipe: Recipe) -> bool:
    """Return True for a recipe whose rule is asynchronous. A rule of the user's own that cannot be made is not: the
    ranks report why."""
    options = recipe.rule
    if not is_user_function(options.name):
        return has_servers(make_rule(recipe))
    command = [sys.executable, "-c", PROGRAM, options.name, options.folder, options.overlap]
    try:
        asked = subprocess.run(command, input=b"", capture_output=True, timeout=LIMIT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return False
    return asked.returncode == ASYNCHRONOUS


def answer(name: str, folder: str, overlap: str) -> int:
    """Return the exit code for a rule of the user's own: ASYNCHRONOUS, or 0."""
    return ASYNCHRONOUS if has_servers(make_rule(Recipe(rule=RuleRecipe(name, folder, overlap)))) else 0
