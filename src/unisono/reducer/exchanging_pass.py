"""Backward pass of a worker of an asynchronous rule: its tasks exchange buckets with servers, not with all ranks."""

from __future__ import annotations

from typing import Any

from unisono.asynchronous.exchange import WorkerExchange
from unisono.reducer.backward_pass import BackwardPass, OptimizerStep
from unisono.reducer.bucket_memory import BucketMemory
from unisono.reducer.buffers import Buffers
from unisono.reducer.control import ControlMessage
from unisono.step.layout import Layout


class ExchangingPass(BackwardPass):
    """Replica that the tasks of a worker's step act on (`step/elastic.py`)."""

    def __init__(
        self,
        memory: BucketMemory,
        buffers: Buffers,
        layout: Layout,
        control_message: ControlMessage,
        optimizer: OptimizerStep | None,
        exchange: WorkerExchange,
    ) -> None:
        super().__init__(memory, buffers, layout, control_message, optimizer)
        self._exchange = exchange

    def copy_weights(self, key: int) -> None:
        """Copy weights to their bucket."""
        self.memory.pack_weights(self.memory.bucket_slice(key), 1)

    def copy_buffers(self) -> None:
        """Copy the model's buffers to the memory they are sent from."""
        self._buffers.pack()

    def announce(self, server: int, link: Any) -> None:
        """Send the header to a server and receive its reply."""
        self._exchange.announce(server, link)

    def swap(self, key: int, link: Any) -> None:
        """Send a bucket and receive the centre's."""
        self._exchange.swap(key, self.bucket(key), link)

    def swap_buffers(self, link: Any) -> None:
        """Send the buffers and receive the centre's."""
        self._exchange.swap_buffers(self._buffers.flat, link)

    def replied(self) -> None:
        """Take a snapshot of this worker where a server has ordered one."""
        self._exchange.replied()

    def pull(self, key: int, alpha: float) -> None:
        """Move the weights of a bucket by the share `alpha` towards the centre."""
        self._exchange.pull(key, self.bucket(key), alpha)
        self.memory.unpack_weights(self.memory.bucket_slice(key))
