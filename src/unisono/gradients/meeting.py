"""Where gradients meet: the buckets, the memory they lie in and the engine that carries their tasks, by one setting.

    passage     │ bucket 0 full │ bucket 1 full │ ...
    key 0       exchange of samples ▶ settle: what this rank's gradients weigh
    key 1              pack (reads key 0) ▶ exchange ▶ settle
    key 2                              pack ▶ exchange ▶ settle

Which tasks there are, and what carries them out, is the embedding's affair (`engine/embeddings/`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from unisono.engine import Handle, Span
from unisono.engine.carrier import Action, Carrier
from unisono.engine.embeddings import MAIN, OUTSTANDING, find_embedding, gradient
from unisono.gradients.exchange import Exchange
from unisono.gradients.layout import Bucket
from unisono.gradients.memory import Memory
from unisono.gradients.passage import Passage
from unisono.plan.choose import Setting
from unisono.world import World


class Meeting:
    """Made by all ranks of `world` together. `observe` hears of all that the engine carries out."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        world: World,
        exchange: Exchange,
        observe: Callable[[Span], None],
    ) -> None:
        self.world = world.twin()
        """For what ranks tell each other while nothing is under way."""
        self.memory = Memory(parameters, self.world)
        self._parameters, self._exchange, self._observe = parameters, exchange, observe
        self._worlds = [self.world]
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
        self._keys: list[list[int]] = [[] for _ in self._parameters]  # of the buckets that each lies in
        for key, bucket in enumerate(self.buckets, 1):
            for number in bucket.parameters:
                self._keys[number].append(key)
        self._complete: list[list[int]] = [[] for _ in range(len(self.buckets) + 1)]
        for number, keys in enumerate(self._keys):
            self._complete[keys[-1]].append(number)
        embedding = find_embedding(setting.embedding)
        if self._carrier is None or self._carrier.embedding is not embedding:
            if self._carrier is not None:
                self._carrier.engine.close()
            while embedding.several and len(self._worlds) < OUTSTANDING:
                self._worlds.append(self.world.twin())
            self._carrier = Carrier(self._worlds, embedding, OUTSTANDING, self._observe)
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
            self._hand_over_count(passage)
        while passage.full(after):
            passage.next += 1
            self._hand_over_bucket(passage.next, passage)
            follow(passage.next, self._complete[passage.next])

    def push_update(self, key: int, numbers: Sequence[int], update: Callable[[], object]) -> Handle:
        """Have these parameters updated when their gradients are there; `key` is that of the last of their buckets."""
        keys = {key, *(of for number in numbers for of in self._keys[number])}
        read = [self.carrier.variable(gradient(of)) for of in sorted(keys)]
        return self.carrier.engine.push(update, read, (), "update", f"update {key}")

    def _hand_over_count(self, passage: Passage) -> None:
        total = torch.tensor([passage.samples], dtype=torch.float64)

        def exchange(world: World) -> None:
            world.allreduce(total)

        def settle(_: World) -> None:
            passage.weight = passage.samples / float(total) if passage.samples else 0.0

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

        actions: dict[str, Action] = {"pack": pack, "exchange": exchange, "unpack": lambda _: self._settle(bucket)}
        self.carrier.push(key, actions, [gradient(0)])
        self.carrier.pull(key, actions)

    def _settle(self, bucket: Bucket) -> None:
        """A bucket's sums are there: what no rank had a gradient for has none."""
        for number, there in zip(bucket.ends, self.memory.flags(bucket), strict=True):
            self._parameters[number].grad = self.memory.views[number] if there else None
