"""What a run of the suite says: tables for people, results.json for the record."""

from __future__ import annotations

import json
import os
import platform
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from outcomes import PASSED, SKIPPED, STATES, Outcome

Results = dict[tuple[str, int], dict[str, Outcome]]
"""By backend and number of ranks: the outcome of every test by its name."""

EXCEPTIONS = Path(__file__).parents[1] / "docs" / "conformance.md"
MOST_EXCEPTIONS = 10


def listed_exceptions(page: str) -> dict[str, str]:
    """The tests that cannot pass, and why, out of the page that lists them: rows | `test_name` | why |."""
    return dict(re.findall(r"^\| `(test_\w+)` \| (.+?) \|$", page, re.MULTILINE))


def behind_reference(results: Results, reference: str) -> dict[str, list[tuple[str, int, Outcome]]]:
    """By its name every test that passes with the reference on as many ranks and not with a backend, and where."""
    behind: dict[str, list[tuple[str, int, Outcome]]] = {}
    for (backend, ranks), outcomes in results.items():
        for name, outcome in outcomes.items():
            expected = results.get((reference, ranks), {}).get(name)
            if expected is not None and expected.state == PASSED != outcome.state:
                behind.setdefault(name, []).append((backend, ranks, outcome))
    return behind


def print_numbers(console: Console, results: Results) -> None:
    """One line for each backend and number of ranks: how many tests ended in which state."""
    table = Table("backend", "ranks", *STATES, "seconds")
    for (backend, ranks), outcomes in results.items():
        counts = Counter(outcome.state for outcome in outcomes.values())
        seconds = sum(outcome.seconds for outcome in outcomes.values())
        table.add_row(backend, str(ranks), *(str(counts[state]) for state in STATES), f"{seconds:.0f}")
    console.print(table)


def print_behind(
    console: Console, behind: Mapping[str, list[tuple[str, int, Outcome]]], exceptions: Mapping[str, str]
) -> None:
    """Each test that the reference passes and a backend doesn't, with the first line of its error."""
    for name, places in sorted(behind.items()):
        console.print(f"{name}{'   (listed in docs/conformance.md)' if name in exceptions else ''}", markup=False)
        for backend, ranks, outcome in places:
            console.print(
                f"    {backend} on {ranks} ranks {outcome.state}: {outcome.reason}", markup=False, soft_wrap=True
            )


def write_results(path: Path, results: Results) -> None:
    """Every outcome, by test; those that all runs skip are told together, by their reason."""
    tests: dict[str, dict[str, object]] = {}
    skipped: dict[str, list[str]] = {}
    for name in sorted({name for outcomes in results.values() for name in outcomes}):
        found = {f"{backend}, {ranks} ranks": outcomes[name] for (backend, ranks), outcomes in results.items()}
        if all(outcome.state == SKIPPED for outcome in found.values()):
            skipped.setdefault("; ".join(sorted({outcome.reason for outcome in found.values()})), []).append(name)
        else:
            tests[name] = {place: _entry(outcome) for place, outcome in found.items()}
    counts = {
        f"{backend}, {ranks} ranks": dict(Counter(outcome.state for outcome in outcomes.values()))
        for (backend, ranks), outcomes in results.items()
    }
    whole = {"machine": _machine(), "counts": counts, "tests": tests, "skipped": skipped}
    path.write_text(_by_line(whole))


def _by_line(whole: Mapping[str, Mapping[str, object]]) -> str:
    """JSON with one entry of each part on a line."""
    parts = [
        f"{json.dumps(name)}: {{\n" + ",\n".join(f" {json.dumps(key)}: {json.dumps(part[key])}" for key in part) + "\n}"
        for name, part in whole.items()
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _entry(outcome: Outcome) -> object:
    """An outcome in the record: seconds where it passed, else the reason as well."""
    if outcome.state == PASSED:
        return {PASSED: outcome.seconds}
    return {outcome.state: outcome.reason}


def _machine() -> dict[str, object]:
    """What the run was made on, as far as it matters."""
    return {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}
