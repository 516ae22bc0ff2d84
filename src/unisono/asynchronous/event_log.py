"""Log of the events of an asynchronous run, from which it is replayed bit for bit.

    RUN/events/server-0.jsonl
        {"number": 0, "worker": 2, "sent": 3, "applied": 3, "stale": 0}
        {"number": 1, "worker": 0, "sent": 3, "applied": 3, "stale": 1}
        {"died": 1, "number": 2}

Everything else follows from the order of the exchanges: workers draw their samples and random numbers by seed, worker
and step. `sent` and `applied` are the steps that the worker had made when it sent its weights, and when it applied the
centre's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

from unisono.errors import CheckpointError
from unisono.files import naming_os_errors, write_atomically

FOLDER = "events"


def log_path(run: Path, server: int) -> Path:
    """Return the file of a server's events."""
    return run / FOLDER / f"server-{server}.jsonl"


def logged_servers(run: Path) -> list[int]:
    """Return the numbers of the servers that have logs, in order."""
    return sorted(int(path.stem.removeprefix("server-")) for path in (run / FOLDER).glob("server-*.jsonl"))


class EventLog:
    """Log of one server. Lines are written out as they come: a run that is killed keeps them."""

    def __init__(self, run: Path, server: int) -> None:
        """Open the log to append. Raises CheckpointError where it cannot be written."""
        path = log_path(run, server)
        with naming_os_errors(f"cannot write {path}", CheckpointError):
            path.parent.mkdir(exist_ok=True)
            self._file: TextIO = path.open("a", buffering=1)

    def add(self, **event: Any) -> None:
        self._file.write(json.dumps(event) + "\n")

    def close(self) -> None:
        self._file.close()


def read_events(run: Path, server: int) -> list[dict[str, Any]]:
    """Return the events of a server, in order; a last line that was cut off is dropped.

    Raises CheckpointError where there are none.
    """
    path = log_path(run, server)
    with naming_os_errors(f"{run} has no events of server {server}", CheckpointError):
        lines = path.read_text().splitlines()
    events = []
    for line in lines:
        try:
            events.append(json.loads(line))
        except ValueError:  # cut off when the run was killed
            break
    return events


def read_order(run: Path, server: int, limit: int | None = None) -> list[int]:
    """Return the workers in the order in which a server has served them, the first `limit` of them."""
    return [event["worker"] for event in read_events(run, server) if "worker" in event][:limit]


def truncate_events(run: Path, server: int, exchange: int, inexact: str = "") -> None:
    """Remove the events from an `exchange` on, where a run resumes before it.

    `inexact` says why a replay of the whole log would find other weights, if it would. A log without any event is
    removed.
    """
    path = log_path(run, server)
    if not path.exists():
        return
    # a death of that number came before the exchange
    kept = [event for event in read_events(run, server) if event["number"] < exchange + ("worker" not in event)]
    kept += [{"inexact": inexact, "number": exchange}] if inexact else []
    if not kept:
        path.unlink()
        return
    with write_atomically(path) as aside:
        aside.write_text("".join(json.dumps(event) + "\n" for event in kept))
