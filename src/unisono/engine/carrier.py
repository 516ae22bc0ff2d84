"""Carries an embedding's tasks out on an engine: what is a name there is a thread, a communicator and a variable here.

Task(exchange, communication, mutate (buffer 3, order))  ──▶  engine.push(action, mutate=[...], "communication")
Task(exchange, main, mutate (buffer 3))                  ──▶  engine.carry_out(action, ...)    in this very thread
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

import torch

from unisono.engine.dependencies import Variable
from unisono.engine.embeddings import MAIN, Embedding, Tag, Task, communicator
from unisono.engine.engine import Handle, Observe
from unisono.engine.exchanges import Exchanges
from unisono.world import World

Action = Callable[[World], object]
"""What a task does; a world whose calls meet no others is given to it."""


class Carrier:
    """The tasks of one embedding, for one user of `exchanges`. All ranks make one together."""

    def __init__(
        self, exchanges: Exchanges, embedding: Embedding, user: str = "", observe: Observe | None = None
    ) -> None:
        """`user` is the name by which ranks tell the exchanges of one user from those of others."""
        self.outstanding = exchanges.outstanding if embedding.several else 1
        self.worlds = exchanges.worlds(self.outstanding)
        self.embedding = embedding
        self._engine, self._user, self._observe = exchanges.engine, user, observe
        self._turns = {communicator(number): exchanges.turn(number) for number in range(exchanges.outstanding)}
        self._variables: defaultdict[Tag, Variable] = defaultdict(Variable)

    def variable(self, tag: Tag) -> Variable:
        """The engine's variable of that name."""
        if (turn := self._turns.get(tag)) is not None:
            return turn
        variable = self._variables[tag]
        variable.name = f"{tag[0]} {tag[1]}"
        return variable

    def push(self, key: int, actions: Mapping[str, Action], read: Iterable[Tag] = ()) -> None:
        """What is to be done when the gradient of a key is there; to pack it, `read` is read as well."""
        self._carry_out(self.embedding.push(key, self.outstanding), key, actions, read)

    def pull(self, key: int, actions: Mapping[str, Action]) -> None:
        """What brings the sum of a key back."""
        self._carry_out(self.embedding.pull(key, self.outstanding), key, actions, ())

    def begin(self, action: Callable[[], object], read: Iterable[Tag], kind: str, name: str) -> Handle:
        """Have something else carried out, once what it reads is there."""
        return self._engine.push(action, map(self.variable, read), (), kind, name, observe=self._observe)

    def wait(self, *tags: Tag) -> None:
        """Wait until all that mutates these, or anything of this user if there are none, is over."""
        self._engine.wait(*map(self.variable, tags or tuple(self._variables)))

    def _carry_out(self, tasks: Iterable[Task], key: int, actions: Mapping[str, Action], extra: Iterable[Tag]) -> None:
        for task in tasks:
            self._hand_over(task, key, actions.get(task.what, World.barrier), extra if task.what == "pack" else ())

    def _hand_over(self, task: Task, key: int, act: Action, extra: Iterable[Tag]) -> None:
        read, mutate = map(self.variable, (*task.read, *extra)), map(self.variable, task.mutate)
        world = self.worlds[task.communicator]
        name = f"{task.what} {key}"
        label = f" [{name} of {self._user}]" if any(tag in self._turns for tag in task.mutate) else ""

        def action() -> None:
            with torch.no_grad():
                if label:
                    call_labelled(world, label, act)
                else:
                    act(world)

        if task.kind == MAIN:
            self._engine.carry_out(action, read, mutate, name, self._observe)
        else:
            self._engine.push(action, read, mutate, task.kind, name, observe=self._observe)


def call_labelled(world: World, label: str, act: Action) -> None:
    """Call the collectives of `act` with a label that ranks compare."""
    world.label(label)
    try:
        act(world)
    finally:
        world.label("")
