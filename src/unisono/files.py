"""Files written whole or not at all, locks, and the folder of files that later runs of the same user read.

choices.json.5f0c2a91d3e8b764.partial ──(whole, on the disk)──▶ choices.json
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from unisono.errors import CheckpointError, UnisonoError, UsageError

PARTIAL = ".partial"
"""End of the names of files that are being written."""


@contextmanager
def naming_os_errors(attempt: str, kind: type[UnisonoError] = UsageError, remedy: str = "") -> Iterator[None]:
    """Within the block, turn an OSError into an error of this kind: `attempt`, its reason, and a remedy."""
    try:
        yield
    except OSError as error:
        raise kind(f"{attempt}: {error.strerror or error}{remedy}") from error


def check_appendable(path: Path, attempt: str) -> None:
    """Raise UsageError, with `attempt`, where nothing can be appended to a file, so that this is known before a run."""
    with naming_os_errors(attempt):
        path.open("ab").close()


@contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """Yield a path in the folder of `path` that nobody else uses, on any host; remove its file at the end."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}{PARTIAL}")
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(path: Path) -> None:
    """Raise OSError where `write_atomically` cannot write a file; what is there stays as it is."""
    with temporary_beside(path) as temporary:
        temporary.touch()


@contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Yield a file to write, which is renamed to `path` if the block succeeds and removed if it fails.

    Of several processes that write `path` at once, the last wins.
    """
    with temporary_beside(path) as temporary:
        yield temporary
        sync(temporary)  # the name must not survive a power cut without the bytes
        temporary.replace(path)


@contextmanager
def locked(path: Path, busy: UnisonoError | None = None) -> Iterator[None]:
    """Lock a file or a folder, which is there, for the block. Where another process has locked it, wait until it has
    ended; or raise `busy`, if given. A file system without locks does not lock."""
    # NFS locks what can be written, and a file may be append-only
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_APPEND)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
        except OSError as error:
            if busy and isinstance(error, BlockingIOError):
                raise busy from error
        yield
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Wait until a file or a folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_own(folder: Path) -> None:
    """Make a folder that this user alone may read, unless it is there. Raises CheckpointError for that of another."""
    with naming_os_errors(f"cannot make {folder}", CheckpointError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise CheckpointError(f"{folder} is open to other users: remove it")


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder of the user's files that can be made again. Raises UsageError where there is no home."""
    try:
        return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unisono"
    except RuntimeError as error:  # neither HOME nor an entry of the user
        raise UsageError(f"{error}; name a folder for Unisono's files in XDG_CACHE_HOME") from error
