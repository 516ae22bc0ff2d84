"""A data set of class folders."""

from pathlib import Path

import numpy as np
from PIL import Image

random = np.random.default_rng(0)
for split, count in (("train", 70), ("test", 10)):
    for name in ("cat", "dog"):
        folder = Path("cifar10-images", split, name)
        folder.mkdir(parents=True)
        for index in range(count):
            Image.fromarray(random.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(folder / f"{index}.png")
