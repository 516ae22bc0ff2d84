"""Carries an embedding's tasks out on an engine: what is a name there is a thread, a communicator and a variable here.

Task(exchange, communication, mutate (buffer 3, order))  ──▶  engine.push(action, mutate=[...], "communication")
Task(exchange, main, mutate (buffer 3))                  ──▶  engine.carry_out(action, ...)    in this very thread
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

import torch

from unisono.engine.dependencies import Variable
from unisono.engine.embeddings import MAIN, OUTSTANDING, Embedding, Tag, Task
from unisono.engine.engine import Engine, Span
from unisono.world import World

Action = Callable[[World], object]
"""What a task does; a world whose calls meet no others is given to it."""


class Carrier:
    """The engine and the communicators of one embedding. All ranks of `world` make one together."""

    def __init__(
        self,
        worlds: Iterable[World],
        embedding: Embedding,
        outstanding: int = OUTSTANDING,
        observe: Callable[[Span], None] = lambda _: None,
    ) -> None:
        """`worlds` are twins, one for each exchange that may go on at once where the embedding has several."""
        self.outstanding = outstanding if embedding.several else 1
        self.worlds = list(worlds)[: self.outstanding]
        self.embedding = embedding
        self.engine = Engine({"communication": len(self.worlds), "update": 1, "computing": 1}, observe)
        self._variables: defaultdict[Tag, Variable] = defaultdict(Variable)

    def variable(self, tag: Tag) -> Variable:
        """The engine's variable of that name."""
        variable = self._variables[tag]
        variable.name = f"{tag[0]} {tag[1]}"
        return variable

    def push(self, key: int, actions: Mapping[str, Action], read: Iterable[Tag] = ()) -> None:
        """What is to be done when the gradient of a key is there; to pack it, `read` is read as well."""
        self._carry_out(self.embedding.push(key, self.outstanding), key, actions, read)

    def pull(self, key: int, actions: Mapping[str, Action]) -> None:
        """What brings the sum of a key back."""
        self._carry_out(self.embedding.pull(key, self.outstanding), key, actions, ())

    def wait(self, *tags: Tag) -> None:
        """Wait until all that mutates these, or anything if there are none, is over."""
        self.engine.wait(*map(self.variable, tags or tuple(self._variables)))

    def _carry_out(self, tasks: Iterable[Task], key: int, actions: Mapping[str, Action], extra: Iterable[Tag]) -> None:
        for task in tasks:
            self._hand_over(task, key, actions.get(task.what, World.barrier), extra if task.what == "pack" else ())

    def _hand_over(self, task: Task, key: int, act: Action, extra: Iterable[Tag]) -> None:
        read, mutate = map(self.variable, (*task.read, *extra)), map(self.variable, task.mutate)
        world = self.worlds[task.communicator]

        def action() -> None:
            with torch.no_grad():
                act(world)

        name = f"{task.what} {key}"
        if task.kind == MAIN:
            self.engine.carry_out(action, read, mutate, name)
        else:
            self.engine.push(action, read, mutate, task.kind, name)
