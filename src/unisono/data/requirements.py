"""Packages that packs, images and audio need, and that a plain install leaves out."""

from __future__ import annotations

from importlib.util import find_spec

from unisono.errors import UsageError, install_command

PACKAGES = {"pyarrow": "pyarrow", "PIL": "pillow", "cv2": "opencv-python-headless"}
"""Modules, and the packages that have them: the extra `data` (`pyproject.toml`)."""


def check_installed() -> None:
    """Raise UsageError unless the packages of the extra `data` are installed; called before they are imported."""
    missing = [package for module, package in PACKAGES.items() if find_spec(module) is None]
    if missing:
        raise UsageError(f"packs need {', '.join(missing)}: {install_command('data')}")
