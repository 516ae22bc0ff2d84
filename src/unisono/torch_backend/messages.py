"""Point-to-point messages of a group: send, recv, from any source, with tags.

A message is posted at once, whatever collectives are under way. Who waits for it looks for itself; for those that
nobody waits for a thread looks now and then, since messages may need this process to move.
"""

from __future__ import annotations

import threading
import time

import torch

from unisono.collectives.overlap import writable
from unisono.collectives.payload import content_of, memory_of, nbytes_of, room_for, settle
from unisono.errors import BackendError, UnisonoError
from unisono.mpi import MPI
from unisono.torch_backend.completions import Completions
from unisono.torch_backend.line import Line
from unisono.torch_backend.profiling import Event, profiled
from unisono.torch_backend.work import Deadline, Work
from unisono.transports.messages import until

LOOK = 1e-3
"""Seconds between two looks at messages that nobody waits for."""

PATIENCE = 3.0
"""Seconds without news after which a wait asks whether the other rank is still there."""

OWN_TAGS = 2
"""The highest tags, which are not for users."""


class Message(Work):
    """One message under way. `peer` is the other rank, MPI.ANY_SOURCE while it is not known."""

    def __init__(
        self,
        name: str,
        tensor: torch.Tensor,
        buffer: torch.Tensor,
        request: MPI.Request,
        peer: int,
        seconds: float,
        office: Messages,
        event: Event | None,
    ) -> None:
        super().__init__(name, [tensor], office.completions, event)
        self._tensor, self._buffer, self._request, self._peer = tensor, buffer, request, peer
        self._receives = name.startswith("recv")
        self._deadline = Deadline(seconds)
        self._office = office
        self._asked = time.monotonic()

    def look(self) -> bool:
        """Whether it is over. One thread at a time looks."""
        if self._ended:
            return True
        status = MPI.Status()
        try:
            if not self._request.Test(status):
                self._check()
                return False
            self._arrive(status)
        except UnisonoError as error:
            if self._request != MPI.REQUEST_NULL:
                self._request.Cancel()
                self._office.abandon(self._request, self._buffer)
            self.end(error if isinstance(error, BackendError) else BackendError(f"{self._words}: {error}"))
        except MPI.Exception as error:
            self.end(BackendError(f"{self._words}: {error.Get_error_string()}"))
        else:
            self.end()
        return True

    @property
    def _words(self) -> str:
        return f"rank {self._office.line.rank} of {self._office.line.size}: {self._name}"

    def _arrive(self, status: MPI.Status) -> None:
        if not self._receives:
            return
        self._peer = status.Get_source()
        came = status.Get_count(MPI.BYTE)
        if came != self._buffer.nbytes:
            raise BackendError(f"{self._words}: {came} bytes came, but the tensor has {self._buffer.nbytes}")
        settle([self._tensor], [self._buffer])

    def _check(self) -> None:
        line = self._office.line
        if line.verdict:
            raise BackendError(line.verdict)
        if self._deadline.over:
            raise BackendError(f"{self._words}: Timed out after {self._deadline.seconds:g} s")
        now = time.monotonic()
        if now - self._asked > PATIENCE:
            self._asked = now
            if self._peer not in (MPI.ANY_SOURCE, line.rank) and line.gone(self._peer):
                raise BackendError(f"{self._words}: rank {self._peer} has ended its program")

    def _await(self, seconds: float | None) -> None:
        """Look here, instead of the thread."""
        if not self._office.take(self):
            super()._await(seconds)
            return
        wanted = Deadline(seconds) if seconds is not None else None
        until(lambda: self.look() or (wanted is not None and wanted.over), lambda: None)
        if not self._ended:
            self._office.leave(self)
            super()._await(0)

    def source_rank(self) -> int:
        """The rank that the message came from."""
        return self._peer

    def _source_rank(self) -> int:
        return self._peer


class Messages:
    """The messages of one group. `comm` is its own; `line` says how the group stands."""

    def __init__(self, comm: MPI.Intracomm, line: Line, completions: Completions) -> None:
        self.comm, self.line, self.completions = comm, line, completions
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._highest: int = comm.Get_attr(MPI.TAG_UB)  # type: ignore[assignment]
        self._pending: list[Message] = []
        self._abandoned: list[object] = []
        self._mutex = threading.Lock()
        self._some = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.astray = False
        """Whether something was sent that nobody will receive, and may still be on its way."""

    def send(self, tensor: torch.Tensor, peer: int, tag: int, seconds: float) -> Message:
        """Send to a rank of the group."""
        nbytes_of(tensor)
        buffer = content_of(tensor.detach())
        request = self.comm.Isend([memory_of(buffer), MPI.BYTE], peer, self._tag(tag))
        name = f"send to rank {peer}, tag {tag}, group {self.line.group}"
        return self.leave(Message(name, tensor, buffer, request, peer, seconds, self, profiled("send", [tensor])))

    def receive(self, tensor: torch.Tensor, peer: int | None, tag: int, seconds: float) -> Message:
        """Receive from a rank of the group, from any for None."""
        nbytes_of(tensor)
        if not writable(tensor):
            raise BackendError(
                f"rank {self.line.rank}: recv into a tensor of shape {tuple(tensor.shape)} and strides "
                f"{tensor.stride()}: several of its elements share memory; give it a .clone()"
            )
        buffer = room_for(tensor)
        source = MPI.ANY_SOURCE if peer is None else peer
        request = self.comm.Irecv([memory_of(buffer), MPI.BYTE], source, self._tag(tag))
        name = f"recv from {'any rank' if peer is None else f'rank {peer}'}, tag {tag}, group {self.line.group}"
        event = profiled("recvAnySource" if peer is None else "recv", [tensor])
        return self.leave(Message(name, tensor, buffer, request, source, seconds, self, event))

    def own_tag(self, number: int) -> int:
        """A tag that no user has; `number` is below OWN_TAGS."""
        return self._highest - number

    def _tag(self, tag: int) -> int:
        if not 0 <= tag <= self._highest - OWN_TAGS:
            raise BackendError(f"tag {tag}; this MPI has tags from 0 to {self._highest - OWN_TAGS}")
        return tag

    def leave(self, message: Message) -> Message:
        """Leave a message to the thread."""
        if message.look():
            return message
        with self._mutex:
            self._pending.append(message)
            self._some.set()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=f"unisono messages {self.line.group}", daemon=True
                )
                self._thread.start()
        return message

    def take(self, message: Message) -> bool:
        """Take a message from the thread; whether it had it."""
        with self._mutex:
            if message not in self._pending:
                return False
            self._pending.remove(message)
            return True

    def abandon(self, *things: object) -> None:
        """Keep what MPI may still write to."""
        self._abandoned += things

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._some.set()
        if self._thread is not None:
            self._thread.join()

    def free(self) -> None:
        """Give the communicator back, when all ranks have ended the group.

        What came and was never asked for is thrown away: MPI uses the numbers of communicators again, and a later one
        would receive it. What may still come keeps the communicator.
        """
        status = MPI.Status()
        while self.comm.Iprobe(status=status):
            lost = bytearray(status.Get_count(MPI.BYTE))
            self.comm.Recv([lost, MPI.BYTE], status.Get_source(), status.Get_tag())
        if not self.astray:
            self.comm.Free()

    def _run(self) -> None:
        while not self._closed:
            self._some.wait()
            time.sleep(LOOK)
            with self._mutex:
                self._pending = [message for message in self._pending if not message.look()]
                if not self._pending and not self._closed:
                    self._some.clear()
