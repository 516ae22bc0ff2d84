"""Names and files of a checkpoint, its manifest, and the errors of reading one. Needs no PyTorch."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.errors import CheckpointError

CHECKPOINTS_KEPT = 3
MANIFEST = "manifest.json"
TENSORS = ("weights", "optimizer")
FORMAT = 2
"""Format that is written. Format 1 can be read: it had no outline of the weights, and another one of the optimizer."""

NAME = re.compile(r"step-\d{9,}")
DAMAGED_SUFFIX, REPLACED_SUFFIX = ".torn", ".replaced"


@dataclass(frozen=True)
class Checkpoint:
    """The state that a run needs to resume."""

    step: int
    """Number of steps made."""
    weights: dict[str, Any]
    """The model's state_dict: tensors, and the results of its modules' `get_extra_state`."""
    optimizer: dict[str, Any]
    """The optimizer's state_dict."""
    progress: dict[str, Any]
    """Further state of the run, as JSON values."""


@dataclass(frozen=True)
class DamagedCheckpoint:
    """Checkpoint that was read to its end and differs from the one written."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} is damaged: {self.reason}"


def checkpoint_name(step: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"step-{step:09d}"


def step_of(name: str) -> int:
    """Return the step of a checkpoint's folder."""
    return int(name.removesuffix(REPLACED_SUFFIX).removeprefix("step-"))


def checkpoint_names(folder: Path) -> list[str]:
    """Return the names of the checkpoints in `folder`, oldest first: those that were renamed into place.

    A checkpoint that was being replaced when its run was killed counts if its successor does not exist.
    Raises CheckpointError where the folder cannot be read, or is a link to nowhere.
    """
    try:
        found = {path.name for path in folder.iterdir()}
    except FileNotFoundError as error:
        if folder.is_symlink():
            raise unreadable(error, folder) from error
        return []
    except OSError as error:
        raise unreadable(error, folder) from error
    replaced = {
        name for name in found if name.endswith(REPLACED_SUFFIX) and name.removesuffix(REPLACED_SUFFIX) not in found
    }
    return sorted(
        name for name in found if NAME.fullmatch(name.removesuffix(REPLACED_SUFFIX) if name in replaced else name)
    )


def read_manifest(path: Path) -> dict[str, Any] | DamagedCheckpoint:
    """Return the manifest of a checkpoint, whose files are read to their end and compared with it.

    Raises CheckpointError where one cannot be read.
    """
    try:
        present = {entry.name for entry in path.iterdir()}
        if MANIFEST not in present:
            return DamagedCheckpoint(path.name, f"it has no {MANIFEST}")
        body = _manifest((path / MANIFEST).read_bytes())
        if isinstance(body, str):
            return DamagedCheckpoint(path.name, body)
        if body["format"] > FORMAT:
            raise CheckpointError(
                f"{path} was written by a newer release (format {body['format']}; this one reads up to {FORMAT}); "
                "nothing was changed: use that release, or rename the folder to resume from the previous one"
            )
        for name, expected in body["files"].items():
            if name not in present:
                return DamagedCheckpoint(path.name, f"it has no {name}")
            if digest(path / name) != expected["sha256"]:
                return DamagedCheckpoint(path.name, f"{name} does not match its checksum")
    except OSError as error:
        raise unreadable(error, path) from error
    return body


def read_progress(folder: Path, name: str) -> dict[str, Any] | None:
    """Return the progress of the checkpoint of that name, without its tensors; None where its manifest is damaged."""
    try:
        body = _manifest((folder / name / MANIFEST).read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(error, folder / name) from error
    return None if isinstance(body, str) else body.get("progress")


def _manifest(content: bytes) -> dict[str, Any] | str:
    """Return a manifest's entries, or why it is damaged. A manifest of a newer format is returned unchecked."""
    try:
        body = json.loads(content)
    except ValueError as error:
        return f"{MANIFEST} is not JSON: {error}"
    if not isinstance(body, dict) or not isinstance(body.get("format"), int):
        return f"{MANIFEST} is no manifest of a checkpoint"
    expected = body.pop("sha256", None)
    if body["format"] <= FORMAT and expected != manifest_digest(body):
        return "its manifest does not match its checksum"
    return body


def unreadable(error: Exception, path: Path) -> CheckpointError:
    """Return the error for a checkpoint, or a folder of them, that cannot be read but may be whole."""
    place = getattr(error, "filename", None) or path
    reason = getattr(error, "strerror", None) or error
    link = Path(place)
    away = f", a link to {link.readlink()}" if link.is_symlink() else ""
    return CheckpointError(
        f"cannot read {place}{away}: {reason}; it may be complete, and nothing was changed: mount its disk or make "
        f"it readable, then resume with --resume, or rename {path} to resume without it"
    )


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def manifest_digest(body: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest's entries."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
