"""Where gradients meet: the buckets, the memory they lie in and the engine that carries their tasks, by one setting.

    passage     │ bucket 0 full │ bucket 1 full │ ...
    key 0       sum of control words ▶ settle: what this rank's gradients weigh
    key 1              pack (reads key 0) ▶ exchange ▶ settle
    key 2                              pack ▶ exchange ▶ settle
    key 3       rank 0's buffers, beside the bucket that fills last: broadcast

Which tasks there are, and what carries them out, is the embedding's affair (`engine/embeddings/`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from unisono.engine import Handle, Span
from unisono.engine.carrier import Action, Carrier
from unisono.engine.embeddings import MAIN, OUTSTANDING, find_embedding, gradient
from unisono.engine.exchanges import Exchanges, User
from unisono.gradients.buffers import Buffers
from unisono.gradients.control import decode, encode
from unisono.gradients.exchange import Exchange
from unisono.gradients.layout import Bucket
from unisono.gradients.memory import Memory
from unisono.gradients.passage import Passage
from unisono.gradients.talk import Talk
from unisono.plan.choose import Setting
from unisono.world import World


class Meeting:
    """Made by all ranks of `world` together for `user`. `observe` hears of all that is carried out for it."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        buffers: Buffers,
        world: World,
        exchange: Exchange,
        observe: Callable[[Span], None],
        user: User,
    ) -> None:
        self.exchanges = world.resource(Exchanges)
        """What carries out the exchanges of all models of the world."""
        self._name = f"model {self.exchanges.enter(user)}"
        self.talk = Talk(self.exchanges, self._name)
        """For what ranks tell each other besides."""
        self.memory = self.talk.call(lambda twin: Memory(parameters, twin))
        self._parameters, self._exchange, self._observe = parameters, exchange, observe
        self._buffers = buffers
        self._carrier: Carrier | None = None
        self.buckets: list[Bucket] = []
        """In the order of exchange; the first one's key is 1."""

    def adopt(self, setting: Setting, order: Sequence[int]) -> None:
        """Follow a setting, for gradients that come in this order. Nothing is under way."""
        for parameter, view in zip(self._parameters, self.memory.views, strict=False):
            if parameter.grad is not None and parameter.grad.data_ptr() == view.data_ptr():
                parameter.grad = parameter.grad.clone()  # what accumulates there
        layout = self.memory.lay_out(order, setting.bucket_bytes)
        self.buckets = [layout.buckets[number] for number in setting.sequence] or list(layout.buckets)
        fills_last = len(layout.buckets) - 1
        self._beside = (setting.sequence.index(fills_last) if setting.sequence else fills_last) + 1
        self._keys: list[list[int]] = [[] for _ in self._parameters]  # of the buckets that each lies in
        for key, bucket in enumerate(self.buckets, 1):
            for number in bucket.parameters:
                self._keys[number].append(key)
        self._complete: list[list[int]] = [[] for _ in range(len(self.buckets) + 1)]
        for number, keys in enumerate(self._keys):
            self._complete[keys[-1]].append(number)
        embedding = find_embedding(setting.embedding)
        if self._carrier is None or self._carrier.embedding is not embedding:
            self._carrier = Carrier(self.exchanges, embedding, self._name, self._observe)
        tasks = [*embedding.push(OUTSTANDING, OUTSTANDING), *embedding.pull(OUTSTANDING, OUTSTANDING)]
        self.by_main = any(task.kind == MAIN for task in tasks)
        """Whether the main thread carries some of it out."""

    @property
    def carrier(self) -> Carrier:
        """What carries the tasks out."""
        assert self._carrier is not None, "it is made with the first setting"
        return self._carrier

    def hand_over(self, passage: Passage, follow: Callable[[int, Sequence[int]], None]) -> None:
        """Hand over what is full, each bucket's key with the parameters of which nothing is missing after it."""
        after = self.carrier.embedding.after
        if not passage.counted and (passage.ended or not after):
            passage.counted = True
            self._hand_over_word(passage)
        while passage.full(after):
            passage.next += 1
            self._hand_over_bucket(passage.next, passage)
            if passage.next == self._beside and self._buffers.slots and self.talk.size > 1:
                self._hand_over_buffers(passage)
            follow(passage.next, self._complete[passage.next])

    def wait_for_buffers(self) -> None:
        """Wait until rank 0's buffers have come."""
        self.carrier.wait(gradient(len(self.buckets) + 1))

    def push_update(self, key: int, numbers: Sequence[int], update: Callable[[], object]) -> Handle:
        """Have these parameters updated when their gradients are there; `key` is that of the last of their buckets."""
        keys = {key, *(of for number in numbers for of in self._keys[number])}
        return self.carrier.begin(update, map(gradient, sorted(keys)), "update", f"update {key}")

    def _hand_over_word(self, passage: Passage) -> None:
        total = torch.tensor(encode(passage.word, self.talk.rank, self.talk.size), dtype=torch.float64)

        def exchange(world: World) -> None:
            world.allreduce(total)

        def settle(_: World) -> None:
            passage.settle(decode(total.tolist()))

        actions: dict[str, Action] = {"pack": lambda _: None, "exchange": exchange, "unpack": settle}
        self.carrier.push(0, actions)
        self.carrier.pull(0, actions)

    def _hand_over_bucket(self, key: int, passage: Passage) -> None:
        bucket = self.buckets[key - 1]

        def pack(_: World) -> None:
            self.memory.pack(bucket, passage.fresh, passage.weight)
            passage.packed(bucket)

        def exchange(world: World) -> None:
            world.allreduce(self.memory.part(bucket), self._exchange.algorithm, self._exchange.wire)

        actions: dict[str, Action] = {
            "pack": pack,
            "exchange": exchange,
            "unpack": lambda _: self._settle(bucket, passage),
        }
        self.carrier.push(key, actions, [gradient(0)])
        self.carrier.pull(key, actions)

    def _hand_over_buffers(self, passage: Passage) -> None:
        if self.talk.rank == 0:
            self._buffers.pack()

        def exchange(world: World) -> None:
            world.broadcast(self._buffers.flat)

        actions: dict[str, Action] = {"pack": lambda _: None, "exchange": exchange, "unpack": lambda _: None}
        self.carrier.push(len(self.buckets) + 1, actions)
        self.carrier.pull(len(self.buckets) + 1, actions)
        passage.buffers = True

    def _settle(self, bucket: Bucket, passage: Passage) -> None:
        """A bucket's sums are there: what no rank had a gradient for has none."""
        flags = self.memory.flags(bucket)
        with passage.lock:
            if not passage.void:
                for number, there in zip(bucket.ends, flags, strict=True):
                    self._parameters[number].grad = self.memory.views[number] if there else None
