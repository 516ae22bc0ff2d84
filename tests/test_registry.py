"""Tables of names: read without importing what they name, and an unknown name lists the others."""

from __future__ import annotations

import subprocess
import sys

import pytest

from unisono.errors import RecipeError, UsageError
from unisono.optimizers import OPTIMIZERS
from unisono.registry import Registry, lazy_attributes
from unisono.rules import RULES
from unisono.wires import WIRES


def test_load_imports_the_object() -> None:
    table = Registry("number", {"pi": "math:pi", "lost": "no_such_module:here"})
    assert (list(table), len(table), table["pi"]) == (["pi", "lost"], 2, "math:pi")
    assert table.load("pi") == pytest.approx(3.14159265)
    with pytest.raises(ModuleNotFoundError):
        table.load("lost")


def test_an_unknown_name_lists_the_names() -> None:
    table = Registry("number", {"pi": "math:pi", "e": "math:e"})
    with pytest.raises(UsageError, match="there is no number 'tau'; there are pi, e"):
        table.load("tau")
    with pytest.raises(RecipeError, match="'tau'"):
        table.check("tau", RecipeError)


@pytest.mark.parametrize("table", [OPTIMIZERS, RULES, WIRES], ids=lambda table: table.kind)
def test_every_row_leads_somewhere(table: Registry) -> None:
    assert all(callable(table.load(name)) for name in table)


def test_names_are_known_without_loading_pytorch() -> None:
    program = "import sys, unisono.optimizers, unisono.rules, unisono.wires; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "False\n"


def test_lazy_attributes_import_from_their_module() -> None:
    find = lazy_attributes("package", {"sqrt": "math"})
    assert find("sqrt")(4.0) == 2.0
    with pytest.raises(AttributeError, match="module 'package' has no attribute 'other'"):
        find("other")
