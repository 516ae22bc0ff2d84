"""Point-to-point messages of a group: send, recv, recv from any source, with tags; and a barrier made of them.

A message is posted at once, whatever collectives are under way. A thread that waits for a message polls it. Messages
that nobody waits for are polled by a background thread, since they may not move without this process.
"""

from __future__ import annotations

import threading
import time
from itertools import islice
from typing import Any

import numpy as np
import torch

from unisono.collectives.payload import is_writable, memory_of, nbytes_of, receive_buffer, send_buffer
from unisono.collectives.watch import Watch
from unisono.device import computed_of, copy_behind, is_on_host
from unisono.errors import BackendError, UnisonoError
from unisono.mpi import MPI
from unisono.torch_backend.work import Completions, SubmissionQueue, Work, profiled
from unisono.transports.messages import wait_until

POLL_INTERVAL_SECONDS = 1e-3
"""Seconds between two polls of messages that nobody waits for."""

PEER_CHECK_SECONDS = 3.0
"""Seconds without completion after which a wait checks whether the other rank has ended its program."""

ARRIVED, RELEASED = 0, 1
"""Messages of a monitored barrier; each has one of the highest tags, which users do not get."""


class Message(Work):
    """Message under way. `peer` is the other rank, MPI.ANY_SOURCE while it is not known.

    `buffer` is the memory that `request` sends or fills: the `tensor` itself where it is plain.
    """

    def __init__(
        self,
        messages: Messages,
        name: str,
        tensor: torch.Tensor,
        buffer: torch.Tensor,
        request: MPI.Request,
        peer: int,
        seconds: float,
    ) -> None:
        shown = "recvAnySource" if peer == MPI.ANY_SOURCE else name.partition(" ")[0]
        super().__init__(name, [tensor], seconds, messages.completions, profiled(shown, [tensor]))
        self._tensor, self._buffer, self._request, self._peer = tensor, buffer, request, peer
        self._receives = name.startswith("recv")
        self._computed = computed_of(tensor) if self._receives else None
        self._messages = messages
        self._peer_checked = time.monotonic()
        self._awaited_since: float | None = None

    def poll(self) -> bool:
        """Poll the message, and return True if it is over. Called by one thread at a time."""
        if self._ended:
            return True
        status = MPI.Status()
        try:
            if not self._request.Test(status):
                self._check()
                return False
            if self._receives:
                self._complete_receive(status)
        except UnisonoError as error:
            if self._request != MPI.REQUEST_NULL:
                self._request.Cancel()
                self._messages.abandoned += self._request, self._buffer
            self.end(error if isinstance(error, BackendError) else BackendError(f"{self._description}: {error}"))
        except MPI.Exception as error:
            self.end(BackendError(f"{self._description}: {error.Get_error_string()}"))
        else:
            self.end()
        return True

    @property
    def _description(self) -> str:
        queue = self._messages.queue
        return f"rank {queue.rank} of {queue.size}: {self.name}"

    def _complete_receive(self, status: MPI.Status) -> None:
        self._peer = status.Get_source()
        received = status.Get_count(MPI.BYTE)
        if received != self._buffer.nbytes:
            sizes = f"received {received} bytes, but the tensor has {self._buffer.nbytes}"
            raise BackendError(f"{self._description}: {sizes}")
        if self._buffer is not self._tensor:
            try:
                copy_behind(self._tensor.detach(), self._buffer, self._computed)  # an inference tensor's alias is none
            except RuntimeError as error:  # of the tensor or its device: this work's alone
                raise BackendError(f"{self._description}: {error}") from error

    def _check(self) -> None:
        queue = self._messages.queue
        if queue.failure:
            raise BackendError(queue.failure)
        now = time.monotonic()
        if self._awaited_since is not None and now - self._awaited_since > self.seconds:
            raise BackendError(f"{self._description}: Timed out after {self.seconds:g} s")
        if now - self._peer_checked > PEER_CHECK_SECONDS:
            self._peer_checked = now
            watch = self._messages.watch
            anyone = [rank for rank in range(queue.size) if rank != queue.rank]
            peers = anyone if self._peer == MPI.ANY_SOURCE else [self._peer]
            if watch is not None and peers and not [peer for peer in peers if not watch.has_ended(queue.calls, peer)]:
                ended = f"rank {peers[0]} has ended its program" if len(peers) == 1 else "all others have ended"
                raise BackendError(f"{self._description}: {ended}")

    def _await(self, seconds: float | None) -> None:
        """Poll in this thread, instead of the background thread."""
        self._begin_time_out()
        if not self._messages.take_from_background(self):
            super()._await(seconds)
            return
        end = float("inf") if seconds is None else time.monotonic() + seconds
        try:
            wait_until(lambda: self.poll() or time.monotonic() > end, lambda: None)
        finally:  # after an error of a signal's handler, too: MPI still has the memory
            self._messages.poll_in_background(self)
        if not self._ended:
            raise BackendError(f"{self.name}: Timed out waiting {seconds} s; it is still under way")

    def is_completed(self) -> bool:
        self._begin_time_out()  # asked again and again, it ends, too
        return super().is_completed()

    def get_future(self) -> torch.futures.Future[Any]:
        self._begin_time_out()
        return super().get_future()

    def _begin_time_out(self) -> None:
        """Let the time-out run from here on, unless somebody has asked for the message before."""
        self._awaited_since = self._awaited_since or time.monotonic()

    def source_rank(self) -> int:
        return self._peer

    _source_rank = source_rank


class Messages:
    """Messages of one group. `comm` is a communicator of its own; `queue` holds the state of the group."""

    def __init__(
        self, comm: MPI.Intracomm, queue: SubmissionQueue, completions: Completions, watch: Watch | None
    ) -> None:
        self.comm, self.queue, self.completions, self.watch = comm, queue, completions, watch
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._highest: int = comm.Get_attr(MPI.TAG_UB)  # type: ignore[assignment]
        self._pending: list[Message] = []
        self.abandoned: list[object] = []
        """Objects that are kept alive, since MPI may still access them."""
        self._posted: list[tuple[MPI.Request, object]] = []  # words of barriers that may be under way
        self._mutex = threading.Lock()
        self._some = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._barriers = 0  # monitored ones so far
        self._undelivered = False  # whether a message was sent that no rank will receive and that may still arrive

    def send(self, tensor: torch.Tensor, peer: int, tag: int, seconds: float) -> Message:
        """Start to send `tensor` to rank `peer` of the group, with a timeout of `seconds`; return the message."""
        content = tensor if is_on_host(tensor) else tensor.cpu()
        nbytes_of(content)
        buffer = send_buffer(content)
        self._check_peer(peer)
        request = self.comm.Isend([memory_of(buffer), MPI.BYTE], peer, self._tag(tag))
        name = f"send to rank {peer}, tag {tag}, group {self.queue.group}"
        return self.poll_in_background(Message(self, name, tensor, buffer, request, peer, seconds))

    def receive(self, tensor: torch.Tensor, peer: int | None, tag: int, seconds: float) -> Message:
        """Start to receive `tensor` from rank `peer` of the group, or from any rank for None; return the message.

        Raises BackendError for a tensor of which several elements share memory.
        """
        place = tensor if is_on_host(tensor) else torch.empty_like(tensor, device="cpu")
        nbytes_of(place)
        if not is_writable(tensor):
            raise BackendError(
                f"rank {self.queue.rank}: recv into a tensor of shape {tuple(tensor.shape)} and strides "
                f"{tensor.stride()}: several of its elements share memory; give it a .clone()"
            )
        buffer = receive_buffer(place)
        if peer is not None:
            self._check_peer(peer)
        source = MPI.ANY_SOURCE if peer is None else peer
        request = self.comm.Irecv([memory_of(buffer), MPI.BYTE], source, self._tag(tag))
        name = f"recv from {'any rank' if peer is None else f'rank {peer}'}, tag {tag}, group {self.queue.group}"
        return self.poll_in_background(Message(self, name, tensor, buffer, request, source, seconds))

    def _check_peer(self, peer: int) -> None:
        """Raise BackendError for what is no rank: MPI takes -1 for nobody, and another negative number for anybody."""
        if not 0 <= peer < self.queue.size:
            ranks = f"the ranks of group {self.queue.group} are 0 to {self.queue.size - 1}"
            raise BackendError(f"rank {self.queue.rank}: a message to or from rank {peer}; {ranks}")

    def _tag(self, tag: int) -> int:
        users = self._highest - RELEASED - 1
        if not 0 <= tag <= users:
            raise BackendError(f"tag {tag}; this MPI has tags from 0 to {users}")
        return tag

    def poll_in_background(self, message: Message) -> Message:
        """Hand a message to the background thread, unless it is over, and return it."""
        if message.poll():
            return message
        with self._mutex:
            self._pending.append(message)
            self._some.set()
            if self._thread is None:
                name = f"unisono messages {self.queue.group}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()
        return message

    def take_from_background(self, message: Message) -> bool:
        """Take a message from the background thread. Return True if the thread had it."""
        with self._mutex:
            if message not in self._pending:
                return False
            self._pending.remove(message)
            return True

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
        if not self._undelivered:
            self.comm.Free()

    def _run(self) -> None:
        while not self._closed:
            self._some.wait()
            time.sleep(POLL_INTERVAL_SECONDS)
            with self._mutex:
                self._pending = [message for message in self._pending if not message.poll()]
                if not self._pending and not self._closed:
                    self._some.clear()

    def monitored_barrier(self, seconds: float, wait_all_ranks: bool) -> None:
        """Wait until all ranks have reached the barrier, `seconds` at most; 2 (p-1) messages.

            rank 1 ── arrived ──▶ rank 0             rank 0 waits for all of them, or raises and names the missing ones
            rank 2 ── arrived ──▶ rank 0
            rank 1, 2 ◀── released ── rank 0         the others raise if no message arrives

        Each message is the number of the barrier: those of earlier ones, which have failed, are discarded.
        Raises BackendError otherwise. Rank 0's names the first missing rank, or with `wait_all_ranks` all of them.
        """
        self._barriers += 1
        end, rank, milliseconds = time.monotonic() + seconds, self.queue.rank, f"{seconds * 1e3:g} ms"
        if rank:
            self._post(0, ARRIVED)
            if not self._received(0, RELEASED, end):
                self._undelivered = True
                raise BackendError(
                    f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for "
                    f"send/recv from rank 0: no message within {milliseconds}. Please check rank 0 logs for faulty "
                    "rank."
                )
            return
        if seconds <= 0:
            self._undelivered = True
            raise BackendError("[Rank 0]: Rank 0 timed out in monitoredBarrier after 0 ms")
        late = (peer for peer in range(1, self.queue.size) if not self._received(peer, ARRIVED, end))
        if missing := list(islice(late, None if wait_all_ranks else 1)):
            self._undelivered = True  # late ranks will still send their message
            ranks = f"Rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            raise BackendError(f"[Rank 0]: {ranks} failed to pass monitoredBarrier in {milliseconds}")
        for peer in range(1, self.queue.size):
            self._post(peer, RELEASED)

    def _post(self, peer: int, what: int) -> None:
        """Send a word of a barrier without a wait."""
        word = np.array([self._barriers])
        self._posted = [(request, sent) for request, sent in self._posted if not request.Test()]
        self._posted.append((self.comm.Isend(word, peer, self._highest - what), word))

    def _received(self, peer: int, what: int, end: float) -> bool:
        """Return True if the word of another rank arrives in time."""
        word = np.zeros(1, np.int64)
        request = self.comm.Irecv(word, peer, self._highest - what)
        try:
            wait_until(lambda: request.Test() or time.monotonic() > end, lambda: None)
        except BaseException:  # of a signal's handler: the word may still arrive
            self.abandoned += request, word
            raise
        if request != MPI.REQUEST_NULL and not request.Test():
            request.Cancel()
            request.Wait()
            return False
        return bool(word[0] >= self._barriers) or self._received(peer, what, end)
