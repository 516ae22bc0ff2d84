"""Images that the tests share."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

Photo = Callable[..., Image.Image]
Encode = Callable[..., bytes]


@pytest.fixture(scope="session")
def photo() -> Photo:
    """A smooth image in colours of any size; its waves are so many pixels long."""

    def make(width: int, height: int, wave: float = 44.0) -> Image.Image:
        y, x = np.mgrid[:height, :width] * (2 * np.pi / wave)
        waves = np.stack([np.sin(x + y / 3), np.cos(x / 3 - y / 2), np.sin((x + y) / 2)], axis=-1)
        return Image.fromarray((127.5 + 110 * waves).astype(np.uint8))

    return make


@pytest.fixture(scope="session")
def encode() -> Encode:
    """The file of an image: a JPEG in "4:4:4", "4:2:2", "4:2:0" or "grey", or another format."""

    def make(picture: Image.Image, kind: str = "4:4:4", **options: Any) -> bytes:
        out = io.BytesIO()
        if kind == "grey":
            picture.convert("L").save(out, "JPEG", **{"quality": 95, **options})
        elif ":" in kind:
            picture.save(out, "JPEG", **{"quality": 95, "subsampling": kind, **options})
        else:
            picture.save(out, kind, **options)
        return out.getvalue()

    return make
