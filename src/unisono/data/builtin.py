"""Data sets that a recipe can name."""

from collections.abc import Callable

from unisono.data import digits
from unisono.data.dataset import Dataset

BUILTIN_DATASETS: dict[str, Callable[[], Dataset]] = {"digits": digits.load}
