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
    number, place = int(entry.labels["cluster"]), int(entry.labels["place"])
    cluster, kind = draw(seed)[number], entry.labels["kind"]
    rule, _, wire = entry.labels["choice"].rpartition(" ")
    probed = find_machine(str(folder / f"cluster-{number}.toml"))
    found = predict(probed, cluster, Contender(place, cluster.runs[place], kind, rule, wire))
    return replace(entry, prediction=replace(found, sealed="after the run, to calibrate"))


def main(seed: str, folder: str) -> None:
    """Write the new ledger, and print the errors."""
    home = Path(folder)
    path = home / "calibration.jsonl"
    path.unlink(missing_ok=True)
    entries = [predicted_again(int(seed), home, one) for one in read(home / LEDGER)[0]]
    for one in entries:
        append(path, one)
        step = one.prediction.step
        words = f"{one.labels['hosts']} {one.labels['rate']} {one.prediction.run.model} {one.labels['choice']}"
        print(f"{words}: {step:.3f} {one.measurement.step.median:.3f} {step / one.measurement.step.median - 1:+.1%}")
    errors = [abs(one.measurement.step.median / one.prediction.step - 1) for one in entries]
    print(
        f"{SHARE:.0%} of {len(errors)} errors, relative to the prediction, are at most {np.quantile(errors, SHARE):.4f}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
