"""Accuracy of Fashion-MNIST with exact sums beside float32's own, by seeds.

    python benchmarks/exact/accuracy.py PACK [--epochs 4] [--seeds 0 1 2]

PACK is what `unisono pack FOLDER PACK` makes of its four IDX files. Runs of the recipe with float32's products and
PyTorch's convolutions: the plain sum of 2 ranks, the same on 1 rank (another order of its sums: what rounding alone
does), and exact sums of 4 virtual ranks. Writes accuracy.json; runs that it has are not repeated.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

from unisono.processor import processor

OUT = Path(__file__).with_name("accuracy.json")

KINDS = {
    "float32, 2 ranks": (2, ()),
    "float32, 1 rank": (1, ()),
    "exact, 4 virtual ranks on 2": (2, ("training.virtual_ranks=4",)),
}
"""Ranks and changes of each kind of run."""


def accuracy_of(pack: Path, seed: int, epochs: int, ranks: int, changes: tuple[str, ...]) -> float:
    """Train once; return the share of the test samples that are right at the end. Raises CalledProcessError."""
    keys = f"data.pack={pack}", f"training.seed={seed}", f"training.epochs={epochs}", *changes
    keys += "compute.precision=float32", "compute.convolutions=library"
    with tempfile.TemporaryDirectory(dir=OUT.parent) as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "unisono", "train", "fashion_mnist", "--ranks", str(ranks), "--run", str(run)]
        subprocess.run([*command, *(word for key in keys for word in ("--set", key))], check=True, capture_output=True)
        return float(json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["test_accuracy"])


def main() -> None:
    """Train what is missing, and print the accuracies."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    results = json.loads(OUT.read_text()) if OUT.is_file() else {"epochs": options.epochs, "runs": []}
    made = {(run["kind"], run["seed"]) for run in results["runs"]}
    for seed in options.seeds:
        for kind, (ranks, changes) in KINDS.items():
            if (kind, seed) not in made:
                accuracy = accuracy_of(options.pack.resolve(), seed, results["epochs"], ranks, changes)
                run = {"kind": kind, "seed": seed, "accuracy": accuracy, "processor": processor().name}
                results["runs"].append(run)
                OUT.write_text(json.dumps(results, indent=1) + "\n")
    for kind in KINDS:
        of_kind = [run["accuracy"] for run in results["runs"] if run["kind"] == kind]
        print(f"{kind}: {', '.join(f'{value:.2%}' for value in of_kind)}; mean {statistics.mean(of_kind):.2%}")


if __name__ == "__main__":
    main()
