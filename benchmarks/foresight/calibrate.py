"""Predicts measured runs again with the present code, and prints the error that 9 of 10 of them do not exceed.

python benchmarks/foresight/calibrate.py SEED FOLDER

The interval of a plan is that error (`plan/run_plan.py`). Runs that calibrate have another seed than those that judge.
Writes `calibration.jsonl`, a ledger of the predictions made again beside the measurements.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from ranks import Contender, predict
from settings import draw

from unisono.foresight.ledger import LEDGER, LedgerEntry, append, read
from unisono.plan.machines import find_machine

SHARE = 0.9


def predicted_again(seed: int, folder: Path, entry: LedgerEntry) -> LedgerEntry:
    """Return the entry with the prediction of the present code."""
    index, place = int(entry.labels["cluster"]), int(entry.labels["place"])
    cluster, kind = draw(seed)[index], entry.labels["kind"]
    rule, _, wire = entry.labels["choice"].rpartition(" ")
    probed = find_machine(str(folder / f"cluster-{index}.toml"))
    prediction = predict(probed, cluster, Contender(place, cluster.runs[place], kind, rule, wire))
    return replace(entry, prediction=replace(prediction, sealed="after the run, to calibrate"))


def main(seed: str, folder: str) -> None:
    """Write the new ledger, and print the errors."""
    home = Path(folder)
    path = home / "calibration.jsonl"
    path.unlink(missing_ok=True)
    entries = [predicted_again(int(seed), home, entry) for entry in read(home / LEDGER)[0]]
    for entry in entries:
        append(path, entry)
        step = entry.prediction.step
        label = f"{entry.labels['hosts']} {entry.labels['rate']} {entry.prediction.run.model} {entry.labels['choice']}"
        print(
            f"{label}: {step:.3f} {entry.measurement.step.median:.3f} {step / entry.measurement.step.median - 1:+.1%}"
        )
    errors = [abs(entry.measurement.step.median / entry.prediction.step - 1) for entry in entries]
    print(
        f"{SHARE:.0%} of {len(errors)} errors, relative to the prediction, are at most {np.quantile(errors, SHARE):.4f}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
