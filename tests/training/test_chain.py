"""The chain of a run cannot be changed in the middle, goes on where a run resumes, and says what differs first."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from unisono.errors import AuditError
from unisono.training.chain import Chain, StepHashes, difference, read_chain, recipe_digest
from unisono.training.recipe import AuditRecipe, ExchangeRecipe, Recipe, TrainingRecipe
from unisono.training.run_directory import recipe_of, truncate_lines, write_recipe


def hashes(step: int) -> StepHashes:
    return StepHashes(step, ["s0", "s1"], ["g0", "g1"], "sum", f"w{step}")


def chain_of(folder: Path, steps: int, before: int = 0) -> Path:
    truncate_lines(folder, before)  # as each run that resumes does
    chain = Chain(folder)
    chain.begin(before, "recipe", f"w{before}")
    for step in range(before + 1, steps + 1):
        chain.add(hashes(step))
    return folder / "chain.jsonl"


def test_each_line_covers_the_one_before(tmp_path: Path) -> None:
    path = chain_of(tmp_path, 3)
    assert [line["step"] for line in read_chain(path)] == [0, 1, 2, 3]
    lines = path.read_text().splitlines()
    edited = json.loads(lines[2]) | {"weights": "other"}
    for wrong in (lines[:2] + lines[3:], [*lines[:2], json.dumps(edited), lines[3]], [*lines[:2], "?", lines[3]]):
        path.write_text("\n".join(wrong) + "\n")
        with pytest.raises(AuditError, match=r"line 3 of .* does not follow from those before it"):
            read_chain(path)


def test_a_run_that_resumes_goes_on_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    uninterrupted = chain_of(tmp_path, 5).read_bytes()
    with (tmp_path / "chain.jsonl").open("ab") as file:
        file.write(b'{"step": 6, "sam')  # killed while it wrote
    assert chain_of(tmp_path, 5, before=3).read_bytes() == uninterrupted


def test_steps_without_hashes_begin_anew(tmp_path: Path) -> None:
    path = chain_of(tmp_path, 2)
    chain_of(tmp_path, 9, before=7)
    lines = read_chain(path)
    assert [line["step"] for line in lines] == [0, 1, 2, 7, 8, 9]
    assert lines[3]["recipe"] == "recipe"


def test_other_weights_than_the_step_has_left_are_refused(tmp_path: Path) -> None:
    chain_of(tmp_path, 3)
    truncate_lines(tmp_path, 2)
    with pytest.raises(AuditError, match="checkpoint of step 2 are not those that the step has left"):
        Chain(tmp_path).begin(2, "recipe", "w9")


def test_settings_that_change_no_bit_change_no_digest(tmp_path: Path) -> None:
    recipe = Recipe()
    others = replace(recipe, ranks=3, audit=AuditRecipe(True), exchange=ExchangeRecipe("ring", "exact", 1.0))
    assert recipe_digest(others) == recipe_digest(recipe)
    write_recipe(tmp_path, others)
    assert recipe_digest(recipe_of(tmp_path, [])) == recipe_digest(recipe)
    assert recipe_digest(replace(recipe, training=TrainingRecipe(seed=1))) != recipe_digest(recipe)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, ""),
        ({"weights": "?"}, "the weights, after the same sum of gradients"),
        ({"sum": "?", "weights": "?"}, "the sum of the gradients, of which those of all shares are the same"),
        ({"gradients": ["g0", "?"], "sum": "?"}, "the gradient of share 1, from the same samples"),
        ({"gradients": ["?", "?"]}, "the gradients of shares 0, 1, from the same samples"),
        ({"samples": ["?", "s1"], "gradients": ["?", "g1"]}, "the samples of share 0"),
    ],
)
def test_what_differs_first(change: dict[str, object], expected: str) -> None:
    assert difference(asdict(hashes(1)), replace(hashes(1), **change)) == expected
