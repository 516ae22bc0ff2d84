"""CIFAR-10's images as files that are read each epoch. Nothing here needs MPI: a DataLoader's workers import it."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from unisono.data.kinds.image import ImageOptions, choose_augmentation
from unisono.data.kinds.image_transform import shifted


class Files(Dataset[tuple[torch.Tensor, int]]):
    """Images by Pillow, shifted, mirrored and normalised as ours are."""

    def __init__(self, folder: Path, keys: list[str], labels: list[int], options: ImageOptions) -> None:
        self.folder, self.keys, self.labels, self.options = folder, keys, labels, options
        self.mean, self.std = (torch.tensor(each).view(3, 1, 1) for each in (options.mean, options.std))

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with Image.open(self.folder / self.keys[index]) as image:
            pixels = np.array(image.convert("RGB"))
        chosen = choose_augmentation(self.options, pixels.shape[1], pixels.shape[0], Random(index))
        pixels = shifted(
            np.ascontiguousarray(pixels[:, ::-1]) if chosen.mirrored else pixels,
            chosen.right,
            chosen.down,
        )
        image = torch.from_numpy(pixels).permute(2, 0, 1).float().div_(255)
        return image.sub_(self.mean).div_(self.std), self.labels[index]
