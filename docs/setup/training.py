"""Two runs to compare."""

import subprocess

for name in ("one", "other"):
    command = ["unisono", "train", "digits", "--set", "training.epochs=2", "--run", f"runs/{name}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
