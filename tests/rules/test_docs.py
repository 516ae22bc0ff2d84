from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.mpi.loops.table import table
from tests.rules.largest import LARGEST, Largest
from tests.rules.leader import Leader
from tests.rules.pull import pull

from unisono.errors import StepError
from unisono.rules import BaseRule
from unisono.step import build
from unisono.step.layout import Layout, even_layout
from unisono.step.operations import pack_weights
from unisono.step.program import UPDATE, Step, Task, bucket, weights
from unisono.step.rule import RankState, Traits
from unisono.step.verify import verify

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["gossip", "largest", "leader", "pull"])
def test_a_rule_in_the_docs_is_the_tested_one(name: str) -> None:
    rule = (ROOT / f"tests/rules/{name}.py").read_text(encoding="utf-8").split('"""\n\n', 1)[1].rstrip()
    assert f"```python\n{rule}\n```" in (ROOT / "docs/rules.md").read_text(encoding="utf-8")
    assert sum(1 for line in rule.splitlines() if line) <= 30


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_replaced_exchange_is_that_of_a_rank_that_is_alone_too(ranks: int) -> None:
    program = Largest(overlap="chain")(Step(0), 0, even_layout(ranks, buckets=2))
    assert sum(task.operation is LARGEST for task in program) == 2


@dataclass(frozen=True)
class Pull(BaseRule):
    """Ranks update alone, then move a part of the way to their mean; it is summed before, as it has to be, or not."""

    sums: bool = True

    @property
    def traits(self) -> Traits:
        return Traits(RankState.OWN)

    def follow(self, event: Step, rank: int, layout: Layout) -> build.Followers:
        sends = self.collectives(layout, rank)
        yield from build.own_updates(layout)
        yield build.AT_THE_END, self.agree(sends)
        for key in layout.keys:
            own = tuple(map(weights, layout.bucket(key).parameters))
            pack = Task(pack_weights(), key, UPDATE, own, (bucket(key),))
            exchange = sends.place(self.allreduce(), key, (), (bucket(key),)) if self.sums else ()
            yield build.AT_THE_END, (pack, *exchange, Task(pull(0.25), key, UPDATE, (bucket(key),), own))
        yield build.AT_THE_END, build.wait_for_weights(layout)


def test_the_operation_in_the_docs_takes_means_and_moves_weights() -> None:
    for ranks in range(1, 6):
        verify(Pull(), even_layout(ranks, buckets=3), [Step(0), Step(1)])
    with pytest.raises(StepError):
        verify(Pull(sums=False), even_layout(2, buckets=3), [Step(0)])
    moved = SimpleNamespace(read_weights=lambda _: torch.tensor([1.0, 3.0]), bucket=lambda _: torch.tensor([2.0, -1.0]))
    moved.write_weights = lambda key, values: setattr(moved, "written", (key, values.tolist()))
    pull(0.25).act(moved, Task(pull(0.25), 2, UPDATE), None)
    assert moved.written == (2, [1.25, 2.0])


def test_the_asynchronous_rule_in_the_docs_is_right() -> None:
    for servers in (1, 2):
        rule = Leader(period=2, servers=servers)
        verify(rule, even_layout(4, buckets=3), [Step(98), Step(99), Step(100), Step(101)], seed=servers)


def test_the_table_of_loops_in_the_docs_is_the_tested_one() -> None:
    assert table() in (ROOT / "docs/rules.md").read_text(encoding="utf-8")
