"""Rules whose other ranks can go on after one has died, as the launcher asks before it starts any.

rule of the table    made here, from the recipe
module:function      made in a process of its own: an import of MPI in the launcher would begin MPI there
"""

from __future__ import annotations

import subprocess
import sys

from unisono.rules import BaseRule, Exchange
from unisono.rules.asynchronous import has_servers
from unisono.training.named_rule import named_rule
from unisono.training.recipe import RuleRecipe
from unisono.training.recipe_check import own_rule
from unisono.user_function import is_user_function

LIMIT_SECONDS = 60.0
"""Longest time to make a rule of the user's own."""

ASYNCHRONOUS = 10
"""Exit code of the process that has made an asynchronous rule."""

PROGRAM = "import sys; from unisono.training.survival import answer; sys.exit(answer(*sys.argv[1:]))"


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
