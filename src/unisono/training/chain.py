"""Chain of hashes of a run with virtual ranks: a line of RUN/chain.jsonl for each step, by which it can be recomputed.

{"step": 0, "recipe": "5e1f...", "weights": "9a40...", "chain": "c0..."}                             a run begins
{"step": 1, "samples": [V], "gradients": [V], "sum": "07...", "weights": "41...", "chain": "d7..."}   │ each covers
{"step": 2, "samples": [V], "gradients": [V], "sum": "5b...", "weights": "f3...", "chain": "88..."}   ▼ the one before

samples     of each share: numbers, inputs and labels       sum      of the gradients, as integers
gradients   of each share, before they are summed           weights  after the step, with the floating-point buffers

A run that resumes, with the chain or without, removes the lines of later steps. It adds a line that begins where steps
are missing, or its recipe has changed. So two runs with the same last `chain` have had the same samples, gradients and
weights. Gradients and their sum have a checksum of 64 bits, which finds errors, not forgers; the rest has BLAKE2b.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from unisono.errors import AuditError
from unisono.files import naming_os_errors
from unisono.tables import flat
from unisono.training.recipe import Recipe, to_dict
from unisono.training.run_directory import CHAIN, add_line

DIGEST_BYTES = 16

WITHOUT_EFFECT = re.compile(
    r"name|ranks|audit\..*|exchange\..*|(model|rule)\.folder|rule\.overlap|compute\.plan|parallel.*"
    r"|training\.(checkpoint_\w+|timeout)|data\.(pack|storage|groups|threads|\w+_megabytes)"
)
"""Keys of a recipe that change no bit of a run with virtual ranks, or only by its samples."""


@dataclass(frozen=True)
class StepHashes:
    """Hashes of a step, with the names that they have in a line of the chain."""

    step: int
    samples: list[str]
    gradients: list[str]
    sum: str
    weights: str


def difference(expected: dict[str, Any], hashes: StepHashes) -> str:
    """Return what differs first in a step from its line in a chain, in words; empty where it is the same."""
    made = asdict(hashes)
    for name, singular in (("samples", "samples"), ("gradients", "gradient")):
        shares = [share for share, pair in enumerate(zip(expected[name], made[name], strict=True)) if len({*pair}) > 1]
        if shares:
            several = f"shares {', '.join(map(str, shares))}" if len(shares) > 1 else f"share {shares[0]}"
            before = "" if name == "samples" else ", from the same samples"
            return f"the {name if len(shares) > 1 else singular} of {several}{before}"
    if expected["sum"] != made["sum"]:
        return "the sum of the gradients, of which those of all shares are the same"
    return "the weights, after the same sum of gradients" if expected["weights"] != made["weights"] else ""


def recipe_digest(recipe: Recipe, without: re.Pattern[str] = WITHOUT_EFFECT) -> str:
    """Return the hash of a recipe's keys but for those `without`: by default, of those that change bits."""
    values = flat(to_dict(recipe)).items()
    settings = {key: int(value) if isinstance(value, float) and value.is_integer() else value for key, value in values}
    return _digest(json.dumps({key: settings[key] for key in sorted(settings) if not without.fullmatch(key)}))


class Chain:
    """Chain in the folder of a run, which rank 0 writes."""

    def __init__(self, folder: Path) -> None:
        self._path, self._last = folder / CHAIN, ""

    def begin(self, step: int, recipe: str, weights: str) -> None:
        """Go on after `step` steps, with the hashes of the recipe and of the weights; there are no later lines. Raises
        AuditError where the chain has been edited, or has other weights after that step."""
        lines = read_chain(self._path)
        last = lines[-1] if lines else {}
        self._last = last.get("chain", "")
        if last.get("step") == step and last["weights"] != weights:
            raise AuditError(
                f"{self._path}: the weights of the checkpoint of step {step} are not those that the step has left: "
                "resume from an earlier checkpoint, or remove the file to begin a new chain"
            )
        recipes = [line["recipe"] for line in lines if "recipe" in line]
        if last.get("step") != step or recipes[-1:] != [recipe]:
            self._add({"step": step, "recipe": recipe, "weights": weights})

    def add(self, hashes: StepHashes) -> None:
        self._add(asdict(hashes))

    def _add(self, line: dict[str, Any]) -> None:
        self._last = _follow(self._last, line)
        add_line(self._path, {**line, "chain": self._last})


def read_chain(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a chain; none where there is no file. A line that was cut off when the run was killed is left
    out. Raises AuditError where a line does not follow from those before it."""
    with naming_os_errors(f"cannot read {path}"):
        content = path.read_bytes() if path.exists() else b""
    lines, last = list[dict[str, Any]](), ""
    for lineno, text in enumerate(content.splitlines(keepends=True), 1):
        if not text.endswith(b"\n"):
            break
        try:
            line = json.loads(text)
            step, last = line["step"], _follow(last, {key: value for key, value in line.items() if key != "chain"})
            follows = last == line["chain"]
        except (ValueError, KeyError, TypeError, AttributeError):
            step, follows = "?", False
        if not follows:
            raise AuditError(
                f"line {lineno} of {path} (step {step}) does not follow from those before it: the file was edited or "
                "damaged there; put it back, or remove it to begin a new chain"
            )
        lines.append(line)
    return lines


def _follow(last: str, line: dict[str, Any]) -> str:
    """Return the hash of a line that covers the line before it."""
    return _digest(last + json.dumps(line, sort_keys=True))


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=DIGEST_BYTES).hexdigest()
