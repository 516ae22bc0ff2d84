"""CIFAR-10's pictures as files that are read each epoch. Nothing here needs MPI: a DataLoader's workers import it."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from unisono.data.pictures.showing import shifted
from unisono.data.pictures.view import View, look


class Files(Dataset[tuple[torch.Tensor, int]]):
    """Pictures by Pillow, shifted, mirrored and normalised as ours are."""

    def __init__(self, folder: Path, keys: list[str], labels: list[int], view: View) -> None:
        self.folder, self.keys, self.labels, self.view = folder, keys, labels, view
        self.mean, self.deviation = (torch.tensor(each).view(3, 1, 1) for each in (view.mean, view.deviation))

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        with Image.open(self.folder / self.keys[number]) as picture:
            pixels = np.array(picture.convert("RGB"))
        how = look(self.view, pixels.shape[1], pixels.shape[0], Random(number))
        pixels = shifted(np.ascontiguousarray(pixels[:, ::-1]) if how.mirrored else pixels, how.right, how.down)
        image = torch.from_numpy(pixels).permute(2, 0, 1).float().div_(255)
        return image.sub_(self.mean).div_(self.deviation), self.labels[number]
