"""The schedule that CONTRIBUTING.md adds is right, and the rows that it names are there."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent
from typing import Any

from unisono.schedules import schedule
from unisono.schedules.verify import verify

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_the_example_is_a_schedule() -> None:
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert code is not None
    names: dict[str, Any] = dict(vars(schedule))
    exec(dedent(code.group(1)), names)
    for ranks in range(1, 10):
        verify(names["star"], ranks)


def test_files_and_folders_that_are_named_exist() -> None:
    for path in re.findall(r"`((?:src|tests|docs|benchmarks)/[\w./]*)`", PAGE):
        if "NAME" not in path and "star" not in path:
            assert (ROOT / path).exists(), path


def test_the_index_of_algorithms_names_files_that_exist() -> None:
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    table = page.partition("## Find an algorithm")[2].partition("## ")[0]
    names = re.findall(r"`((?!src)[\w/]+(?:\.py|/))`", table)
    assert len(names) > 30
    for name in names:
        assert (ROOT / "src" / "unisono" / name).exists() or any(
            (ROOT / "src/unisono" / folder / name).exists() for folder in ("schedules", "compute/algorithms")
        ), name


def test_every_citation_in_the_code_is_in_the_references() -> None:
    """`Somebody et al. 2015`, `Somebody and Other 2015` in source and docs lead to a row of docs/references.md."""
    references = (ROOT / "docs" / "references.md").read_text(encoding="utf-8")
    people = r"[A-Z][a-z]+(?:, [A-Z][a-z]+)*(?: and [A-Z][a-z]+| et al\.?)"
    cited = set()
    for path in (*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"):
        text = re.sub(r"\s+", " ", path.read_text(encoding="utf-8"))
        cited |= {(name, year) for name, year in re.findall(rf"({people}),? \(?((?:19|20)\d\d)\b", text)}
    rows = [row for row in references.splitlines() if row.startswith("|")]
    assert len(cited) >= 12
    for name, year in sorted(cited):
        assert any(name.split(",")[0].split(" ")[0] in row and year in row for row in rows), (name, year)
