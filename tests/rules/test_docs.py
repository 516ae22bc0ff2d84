from pathlib import Path

import pytest
from tests.mpi.loops.table import table
from tests.rules.leader import Leader

from unisono.step.layout import even_layout
from unisono.step.program import Step
from unisono.step.verify import verify

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["gossip", "largest", "leader"])
def test_a_rule_in_the_docs_is_the_tested_one(name: str) -> None:
    rule = (ROOT / f"tests/rules/{name}.py").read_text(encoding="utf-8").split('"""\n\n', 1)[1].rstrip()
    assert f"```python\n{rule}\n```" in (ROOT / "docs/rules.md").read_text(encoding="utf-8")
    assert sum(1 for line in rule.splitlines() if line) <= 30


def test_the_asynchronous_rule_in_the_docs_is_right() -> None:
    for servers in (1, 2):
        rule = Leader(period=2, servers=servers)
        verify(rule, even_layout(4, buckets=3), [Step(98), Step(99), Step(100), Step(101)], seed=servers)


def test_the_table_of_loops_in_the_docs_is_the_tested_one() -> None:
    assert table() in (ROOT / "docs/rules.md").read_text(encoding="utf-8")
