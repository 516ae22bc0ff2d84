"""The field's words: no docstring begins with a question word, and names that were replaced stay away."""

from __future__ import annotations

import ast
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))

QUESTIONS = {"What", "Whether", "Where", "Of", "How", "Who", "Whose", "Which"}

REPLACED = {
    "part_reduce": "reduce_scatter",
    "part_broadcast": "all_gather",
    "on_root": "call_on_root",
    "on_all": "call_on_all",
    "agreeing": "agree_on_errors",
    "twin": "dup",
    "embedding": "overlap",
}
"""Names of before, and those of today."""

CONVERTERS = {"choosing/table.py": {"part_reduce", "part_broadcast"}, "training/recipe.py": {"embedding"}}
"""Files that read what older releases wrote, with the names that stand there in strings."""


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Strings that stand alone: docstrings, and those below constants and attributes."""
    for node in ast.walk(tree):
        for statement in getattr(node, "body", []) if isinstance(getattr(node, "body", None), list) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src")))
def test_docstrings_begin_with_a_verb_or_a_noun(path: Path) -> None:
    texts = [(line, text.split()) for line, text in docstrings(ast.parse(path.read_text()))]
    assert [(line, words[0]) for line, words in texts if words and words[0].strip('",.:;') in QUESTIONS] == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src")))
def test_names_that_were_replaced_stay_away(path: Path) -> None:
    with path.open("rb") as file:
        names = {token.string for token in tokenize.tokenize(file.readline) if token.type == tokenize.NAME}
    assert names.isdisjoint(REPLACED)


def test_texts_say_them_neither() -> None:
    """Docs and messages: strings of the source outside the converters, and the pages."""
    for path in SOURCES:
        kept = CONVERTERS.get(str(path.relative_to(ROOT / "src" / "unisono")), set())
        text = path.read_text(encoding="utf-8")
        for word in ("part_reduce", "part_broadcast"):
            allowed = kept | ({word} if "PCL-DNN (section 3.4) calls it" in text else set())
            assert word in allowed or word not in text, path
    for page in (*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        text = page.read_text(encoding="utf-8")
        assert not [word for word in ("part_reduce", "part_broadcast", "held out") if word in text], page
