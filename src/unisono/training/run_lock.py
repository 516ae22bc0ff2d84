"""A lock that keeps a folder to one run at a time. It opens when its holder ends, however that ends.

    RUN/.lock    {"host": "node-a", "process": 4711, "born": "8812033", "since": "2026-01-31T12:00:00+01:00"}

The file is locked by `flock` and removed at the end. The kernel releases the lock when the holder dies, on NFS too.
Where a file system has no `flock`, the file itself is the lock; it does not count once its holder on this host is dead.
"""

from __future__ import annotations

import datetime
import errno
import fcntl
import json
import os
import socket
from pathlib import Path

from unisono.errors import UsageError

LOCK = ".lock"

NO_FLOCK = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
"""Error numbers of file systems without `flock`."""


class RunLock:
    """The lock of a run's folder, taken by one rank for all."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._descriptor = -1

    def take(self, folder: Path) -> None:
        """Take the lock of `folder`. Raises UsageError naming the holder, or the file system's error."""
        path = folder / LOCK
        try:
            while not self._taken(path):
                pass  # its holder has just removed the file, or has died
        except OSError as error:
            raise UsageError(f"cannot lock the run's folder: {path}: {error.strerror}") from error
        self._path = path

    def release(self) -> None:
        """Release the lock, if it is held."""
        if self._path is None:
            return
        self._path.unlink(missing_ok=True)  # before it opens: the next one makes a file of its own
        os.close(self._descriptor)
        self._path, self._descriptor = None, -1

    def _taken(self, path: Path) -> bool:
        """Try once to take the lock; return False where the file belonged to a holder that is gone."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            holder = os.pread(descriptor, 4096, 0)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UsageError(_in_use(path, holder)) from error
            except OSError as error:
                if error.errno not in NO_FLOCK:
                    raise
                return self._taken_without_flock(path, holder)
            if not _is_at(descriptor, path):
                return False
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, _mine(), 0)
            self._descriptor, descriptor = descriptor, -1
            return True
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _taken_without_flock(self, path: Path, holder: bytes) -> bool:
        if holder and _lives(holder):
            raise UsageError(
                f"{_in_use(path, holder)}; this file system has no locks: if that run has ended, remove {path}"
            )
        aside = path.with_name(f"{LOCK}.{socket.gethostname()}.{os.getpid()}")
        try:
            path.rename(aside)
            faster = aside.read_bytes() != holder  # somebody has taken it between: it goes back
            if not faster:
                aside.write_bytes(_mine())
            os.link(aside, path)
        except (FileNotFoundError, FileExistsError):
            return False
        finally:
            aside.unlink(missing_ok=True)
        if faster:
            return False
        self._descriptor = os.open(path, os.O_RDONLY)
        return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Return True if an open file is still the one at `path`: its holder may have removed it."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _mine() -> bytes:
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    process = os.getpid()
    return json.dumps({"host": socket.gethostname(), "process": process, "born": _born(process), "since": now}).encode()


def _born(process: int) -> str:
    """Return the start time of a process, in the kernel's ticks; empty where it is unknown or the process is dead."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _lives(holder: bytes) -> bool:
    """Return True if the holder may be alive; on another host this cannot be known."""
    try:
        found = json.loads(holder)
        host, process, born = found["host"], found["process"], found["born"]
    except (ValueError, KeyError, TypeError):
        return False
    if host != socket.gethostname():
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return not born or _born(process) == born


def _in_use(path: Path, holder: bytes) -> str:
    try:
        found = json.loads(holder)
        who = f"process {found['process']} on {found['host']}, since {found['since']}"
    except (ValueError, KeyError, TypeError):  # it has not written its name yet
        who = "another process"
    return f"{path.parent} is in use by {who}: one run at a time; wait for its end, or end it"
