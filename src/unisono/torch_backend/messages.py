"""Point-to-point messages of a group: send, recv, recv from any source, with tags.

A message is posted at once, whatever collectives are under way. A thread that waits for a message polls it. Messages
that nobody waits for are polled by a background thread, since they may not move without this process.
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
"""Seconds between two polls of messages that nobody waits for."""

PATIENCE = 3.0
"""Seconds without completion after which a wait checks whether the other rank has ended its program."""

OWN_TAGS = 2
"""Number of the highest tags, which are reserved for internal use."""


class Message(Work):
    """Message under way. `peer` is the other rank, MPI.ANY_SOURCE while it is not known."""

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
        """Poll the message, and return True if it is over. Called by one thread at a time."""
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
        """Poll in this thread, instead of the background thread."""
        if not self._office.take(self):
            super()._await(seconds)
            return
        wanted = Deadline(seconds) if seconds is not None else None
        until(lambda: self.look() or (wanted is not None and wanted.over), lambda: None)
        if not self._ended:
            self._office.leave(self)
            super()._await(0)

    def source_rank(self) -> int:
        """Return the rank that the message came from."""
        return self._peer

    def _source_rank(self) -> int:
        return self._peer


class Messages:
    """Messages of one group. `comm` is a communicator of its own; `line` holds the state of the group."""

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
        """True once a message was sent that nobody will receive and that may still be on its way."""

    def send(self, tensor: torch.Tensor, peer: int, tag: int, seconds: float) -> Message:
        """Start to send `tensor` to rank `peer` of the group, with a timeout of `seconds`; return the message."""
        nbytes_of(tensor)
        buffer = content_of(tensor.detach())
        request = self.comm.Isend([memory_of(buffer), MPI.BYTE], peer, self._tag(tag))
        name = f"send to rank {peer}, tag {tag}, group {self.line.group}"
        return self.leave(Message(name, tensor, buffer, request, peer, seconds, self, profiled("send", [tensor])))

    def receive(self, tensor: torch.Tensor, peer: int | None, tag: int, seconds: float) -> Message:
        """Start to receive `tensor` from rank `peer` of the group, or from any rank for None; return the message.

        Raises BackendError for a tensor of which several elements share memory.
        """
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
        """Return a tag that no user can use; `number` is below OWN_TAGS."""
        return self._highest - number

    def _tag(self, tag: int) -> int:
        if not 0 <= tag <= self._highest - OWN_TAGS:
            raise BackendError(f"tag {tag}; this MPI has tags from 0 to {self._highest - OWN_TAGS}")
        return tag

    def leave(self, message: Message) -> Message:
        """Leave a message to the background thread, and return it."""
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
        """Take a message from the background thread. Return True if the thread had it."""
        with self._mutex:
            if message not in self._pending:
                return False
            self._pending.remove(message)
            return True

    def abandon(self, *things: object) -> None:
        """Keep objects alive that MPI may still access."""
        self._abandoned += things

    def close(self) -> None:
        """End the background thread."""
        self._closed = True
        self._some.set()
        if self._thread is not None:
            self._thread.join()

    def free(self) -> None:
        """Free the communicator, once all ranks have ended the group.

        Messages that were never received are discarded: MPI reuses the numbers of communicators, and a later
        communicator would receive them. The communicator is kept where messages may still arrive.
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
