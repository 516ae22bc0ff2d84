"""The papers' figures beside what the project's equations give for them.

python -m benchmarks.seeds.run
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.seeds import gpu_systems, pcl_dnn, swcaffe
from benchmarks.seeds.figure import SeedFigure, as_json, as_markdown

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[1] / "docs" / "planning_equations.md"
BEGIN, END = "<!-- benchmarks/seeds/run.py writes from here -->\n\n", "\n<!-- to here -->"


def figures() -> list[SeedFigure]:
    """Return the figures of all papers."""
    return [*pcl_dnn.figures(), *gpu_systems.figures(), *swcaffe.figures()]


def with_table(page: str, table: str) -> str:
    """Return the page with this table between its two marks."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + table + END + rest.partition(END)[2]


def main() -> None:
    """Write results.json, summary.md and the table of docs/planning_equations.md."""
    found = figures()
    table = as_markdown(found) + "\n"
    (FOLDER / "results.json").write_text(json.dumps(as_json(found), indent=1) + "\n", encoding="utf-8")
    (FOLDER / "summary.md").write_text(table, encoding="utf-8")
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), table), encoding="utf-8")


if __name__ == "__main__":
    main()
