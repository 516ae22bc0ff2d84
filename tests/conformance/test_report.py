"""What a run of PyTorch's tests says."""

from __future__ import annotations

import json
from pathlib import Path

from outcomes import FAILED, HUNG, PASSED, SKIPPED, Outcome
from report import EXCEPTIONS, MOST_EXCEPTIONS, behind_reference, listed_exceptions, write_results

RESULTS = {
    ("gloo", 3): {"test_a": Outcome(PASSED), "test_b": Outcome(FAILED, "x"), "test_c": Outcome(SKIPPED, "no GPU")},
    ("ours", 3): {"test_a": Outcome(HUNG, "z"), "test_b": Outcome(FAILED, "y"), "test_c": Outcome(SKIPPED, "no GPU")},
    ("ours", 4): {"test_a": Outcome(FAILED, "gloo was not run on as many ranks")},
}


def test_only_what_the_reference_passes_on_as_many_ranks_counts() -> None:
    assert behind_reference(RESULTS, "gloo") == {"test_a": [("ours", 3, Outcome(HUNG, "z"))]}


def test_the_page_lists_the_exceptions_with_their_reasons() -> None:
    exceptions = listed_exceptions(EXCEPTIONS.read_text())
    assert len(exceptions) <= MOST_EXCEPTIONS
    assert all(exceptions.values())
    assert listed_exceptions("| test | why |\n| --- | --- |\n| `test_a` | cannot |\n") == {"test_a": "cannot"}


def test_results_tell_each_outcome_and_what_all_skip_together(tmp_path: Path) -> None:
    both = {place: RESULTS[place] for place in (("gloo", 3), ("ours", 3))}
    write_results(tmp_path / "results.json", both)
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["counts"]["gloo, 3 ranks"] == {PASSED: 1, FAILED: 1, SKIPPED: 1}
    assert written["tests"]["test_a"] == {"gloo, 3 ranks": {PASSED: 0.0}, "ours, 3 ranks": {HUNG: "z"}}
    assert written["skipped"] == {"no GPU": ["test_c"]}
